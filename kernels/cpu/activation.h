// Activations of feed-forward layers, in float32: SiLU, GELU (exact to 2e-7, by tanh and by a sigmoid), ReLU, its square
// and xIELU.
#pragma once

#include "vec.h"

enum class Activation : int {
    SILU = 0,
    GELU = 1,
    GELU_TANH = 2,
    RELU = 3,
    RELU2 = 4,
    SWIGLU_OAI = 5,
    GELU_QUICK = 6,
    XIELU = 7
};

// Of SWIGLU_OAI, gate * sigmoid(alpha * gate) * (up + 1), where gate is at most `limit` and up from -limit to limit.
struct SwigluForm {
    float alpha = 1.702f, limit = 7.0f;
};

// Of XIELU (Huang and Schlag, 2024, arXiv:2411.13010): `positive` x^2 + `linear` x where x > 0, else `negative`
// (exp(min(x, largest)) - 1 - x) + `linear` x.
struct XieluForm {
    float positive, negative, linear, largest;
};

// x * sigmoid(t); zero below the range of exp_of, where it is zero in float32.
template <class Vector>
INLINE Vector times_sigmoid(Vector x, Vector t) {
    return t < -88.0f ? Vector{} : x / (1.0f + exp_of(-t));
}

template <class Vector>
INLINE Vector sigmoid(Vector x) {
    return times_sigmoid(Vector{} + 1.0f, x);
}

// silu(gate) * up; 0 * up below the range of exp_of, where silu is zero in float32: NaN of `up` stays.
template <class Vector>
INLINE Vector silu_mul(Vector gate, Vector up) {
    return times_sigmoid(gate, gate) * up;
}

template <class Vector>
INLINE Vector clamped_swiglu(Vector gate, Vector up, const SwigluForm& form) {
    const Vector most = form.limit - Vector{};
    gate = gate > most ? most : gate;
    up = up > most ? most : up;
    up = up < -most ? -most : up;
    return times_sigmoid(gate, form.alpha * gate) * (up + 1.0f);
}

// tanh, with an absolute error of 2e-7.
template <class Vector>
INLINE Vector tanh_of(Vector x) {
    const Vector doubled = x + x;
    const Vector cut = doubled > 80.0f ? 80.0f - Vector{} : doubled;
    return 1.0f - 2.0f / (1.0f + exp_of(cut));
}

// x * P(X <= x) of a normal distribution, by the error function of Abramowitz and Stegun (1964, 7.1.26).
template <class Vector>
INLINE Vector gelu(Vector x) {
    const Vector z = (x < 0.0f ? -x : x) * 0.70710678f;
    const Vector t = 1.0f / (1.0f + 0.3275911f * z);
    Vector p = 1.061405429f * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const Vector tail = 0.5f * p * t * exp_of(-z * z);  // P(X > |x|)
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

template <class Vector>
INLINE Vector xielu(Vector x, const XieluForm& form) {
    const Vector cut = x < form.largest ? x : form.largest - Vector{};
    const Vector low = form.negative * (exp_of(cut) - 1.0f - x);
    return form.linear * x + (x > 0.0f ? form.positive * x * x : low);
}

template <Activation KIND, class Vector>
INLINE Vector activate(Vector x) {
    if constexpr (KIND == Activation::SILU) return times_sigmoid(x, x);
    if constexpr (KIND == Activation::GELU) return gelu(x);
    // 0.5 (1 + tanh(u)) is sigmoid(2u).
    if constexpr (KIND == Activation::GELU_TANH) return times_sigmoid(x, 1.59576912f * x * (1.0f + 0.044715f * x * x));
    if constexpr (KIND == Activation::GELU_QUICK) return times_sigmoid(x, 1.702f * x);
    const Vector positive = x <= 0.0f ? Vector{} : x;  // in this form NaN stays
    return KIND == Activation::RELU ? positive : positive * positive;
}

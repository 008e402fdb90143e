// The gated delta rule (Yang et al., 2024, arXiv:2412.06464): a linear attention whose state has one size for any length.
//
//     q, k, v, z, b, a ─ DeltaConv ─► normalized q and k, v, decay and beta ─ DeltaRule ─► o ─ DeltaNorm ─► activations
//
// Of each value head, with a state S [key_dim][value_dim] and, for each token,
//
//     S = decay S;  S += k (beta (v - S^T k))^T;  o = S^T q;  out = rms(o) w silu(z)
//
// Tokens are computed one after the other: the columns of S are independent, so that 32 of them, a slice, stay in the
// first cache for all tokens of a chunk. A chunked form would have as many multiplications. Every number has one order
// of operations, whatever the chunk, the rows beside it, the number of threads and the width of vectors.
//
// The state of a row is a slot: for each layer, S as [value head][slice][key_dim][32], then the last three inputs of the
// convolution [3][channels], float32.
#pragma once

#include <algorithm>
#include <cstring>

#include "activation.h"
#include "states.h"
#include "step.h"

namespace delta {

constexpr int SLICE = 32;  // columns of a state
constexpr int TAPS = 4;    // of the convolution
constexpr int CHAINS = 4;  // sums over keys that are computed at once, so that no addition waits for the one before

struct Layer {
    int key_heads, value_heads, key_dim, value_dim;
    int tiled;             // whether value heads that are `key_heads` apart share a key head, and not adjacent ones
    float beta;            // factor of the sigmoid
    float eps;             // of the norm
    const float* conv;     // [TAPS][channels]
    const float* rates;    // [value_heads], -exp(A_log)
    const float* dt_bias;  // [value_heads]
    const float* norm;     // [value_dim]
    const int32_t* places; // [value_heads] of all heads of the model; null: these are all
    int all_heads;         // value heads of the model

    int place(int head) const { return places ? places[head] : head; }
    int keys() const { return key_heads * key_dim; }
    int values() const { return value_heads * value_dim; }
    int channels() const { return 2 * keys() + values(); }
    int key_head(int head) const { return tiled ? head % key_heads : head / (value_heads / key_heads); }
    int inputs() const { return channels() + values() + 2 * value_heads; }  // q, k, v, z, b, a
    size_t state() const { return size_t(values()) * key_dim; }             // floats before the convolution's inputs
};

// Sixteen lanes, on every ISA folded onto each other in the same order.
struct Lanes {
    vf parts[16 / LANES] = {};

    void add_square(const float* from) {
        for (int i = 0; i < 16 / LANES; i++) {
            const vf value = load<vf>(from + i * LANES);
            parts[i] = fma(value, value, parts[i]);
        }
    }
    float total() {
        for (int num = 16 / LANES / 2; num; num /= 2)
            for (int i = 0; i < num; i++) parts[i] += parts[i + num];
        return sum(parts[0]);
    }
};

INLINE float squares(const float* from, int width) {
    Lanes lanes;
    for (int i = 0; i < width; i += 16) lanes.add_square(from + i);
    return lanes.total();
}

// log of numbers from 1 on: the polynomial of Cephes' logf (Moshier, 1989).
INLINE vf log_of(vf x) {
    vf exponent = __builtin_convertvector((bits<vi>(x) >> 23) - 126, vf);
    vf m = bits<vf>((bits<vi>(x) & 0x007FFFFF) | 0x3F000000);  // from 1/2 to 1
    const vi is_low = m < 0.70710678f;
    exponent = is_low ? exponent - 1.0f : exponent;
    m = (is_low ? m + m : m) - 1.0f;
    const vf square = m * m;
    vf p = fma(m, splat(7.0376836292e-2f), splat(-1.1514610310e-1f));
    for (const float c : {1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f,
                          -2.4999993993e-1f, 3.3333331174e-1f})
        p = fma(p, m, splat(c));
    vf log = p * m * square;
    log = fma(exponent, splat(-2.12194440e-4f), log);
    log = fma(square, splat(-0.5f), log);
    return fma(exponent, splat(0.693359375f), m + log);
}

// log(1 + e^x), which is x above 20, as in torch.
INLINE vf softplus(vf x) {
    const vf power = exp_of(x > 20.0f ? splat(20.0f) : x), above = power + 1.0f;
    // What 1 + power lost when it was rounded is mended by the quotient (Kahan).
    const vf log = above == 1.0f ? power : log_of(above) * (power / (above - 1.0f));
    return x > 20.0f ? x : log;
}

// The entry of a step that a token belongs to.
INLINE int row_of(const Step& step, int token) {
    return int(std::upper_bound(step.offsets, step.offsets + step.rows, token) - step.offsets) - 1;
}

}  // namespace delta

// The causal convolution of queries, keys and values, SiLU and the norms of queries and keys, and what the gates b and a
// become. A tile is some heads of a token.
class DeltaConv final : public Op {
   public:
    // `in` [tokens][layer.inputs()]; `out` [tokens][channels] and `gates` [tokens][decay, then beta of each value head].
    DeltaConv(const delta::Layer& layer, const RowStates& state, const float* in, float* out, float* gates)
        : Op("delta_conv"), layer_(layer), state_(state), in_(in), out_(out), gates_(gates) {}

    int tiles(const Step& step) const override { return step.tokens * parts(); }

    void tile(const Step& step, int index, const Scratch&) override {
        const int token = index / parts(), part = index % parts();
        const int row = delta::row_of(step, token), behind = token - step.offsets[row];
        const float* state = state_.read(row);
        const size_t inputs = layer_.inputs(), channels = layer_.channels();
        const float* taps[delta::TAPS];  // the channels of the last four tokens, null for zeros
        for (int i = 0; i < delta::TAPS; i++) {
            const int at = behind + i - (delta::TAPS - 1);
            taps[i] = at >= 0 ? in_ + (token + at - behind) * inputs
                      : state ? state + layer_.state() + (at + delta::TAPS - 1) * channels
                              : nullptr;
        }
        const int heads = 2 * layer_.key_heads + layer_.value_heads;
        for (int i = heads * part / parts(); i < heads * (part + 1) / parts(); i++)
            if (i < 2 * layer_.key_heads)
                head(taps, token, i * layer_.key_dim, layer_.key_dim, i < layer_.key_heads);
            else
                convolve(taps, token, 2 * layer_.keys() + (i - 2 * layer_.key_heads) * layer_.value_dim, layer_.value_dim);
        if (part == 0) gates(token);
    }

    Cost cost(const Step& step) const override { return {double(step.tokens) * layer_.channels() * 8, 0}; }

   private:
    static constexpr int PART = 2048;  // channels
    int parts() const { return ceil_div(layer_.channels(), PART); }

    void convolve(const float* const (&taps)[delta::TAPS], int token, int first, int width) const {
        const size_t channels = layer_.channels();
        float* to = out_ + token * channels;
        for (int c = first; c < first + width; c += LANES) {
            vf total{};
            for (int i = 0; i < delta::TAPS; i++)
                if (taps[i]) total = fma(load<vf>(taps[i] + c), load<vf>(layer_.conv + i * channels + c), total);
            store(to + c, times_sigmoid(total, total));
        }
    }

    // A head of queries or keys; those of queries are divided by the root of their size.
    void head(const float* const (&taps)[delta::TAPS], int token, int first, int width, bool is_query) const {
        convolve(taps, token, first, width);
        float* to = out_ + size_t(token) * layer_.channels() + first;
        float factor = 1.0f / std::sqrt(delta::squares(to, width) + 1e-6f);
        if (is_query) factor /= std::sqrt(float(width));
        for (int c = 0; c < width; c += LANES) store(to + c, load<vf>(to + c) * factor);
    }

    void gates(int token) const {
        const int heads = layer_.value_heads;
        const float* b = in_ + size_t(token) * layer_.inputs() + layer_.channels() + layer_.values();
        const float* a = b + heads;
        float *decay = gates_ + size_t(token) * 2 * heads, *beta = decay + heads;
        for (int h = 0; h < heads; h += LANES) {
            const int count = std::min(LANES, heads - h);
            const vf scaled = some(layer_.rates + h, count) * delta::softplus(some(a + h, count) + some(layer_.dt_bias + h, count));
            const vf decays = exp_of(scaled), betas = sigmoid(some(b + h, count)) * layer_.beta;
            memcpy(decay + h, &decays, count * 4), memcpy(beta + h, &betas, count * 4);
        }
    }

    static vf some(const float* from, int count) {
        vf values{};
        memcpy(&values, from, count * 4);
        return values;
    }

    const delta::Layer layer_;
    const RowStates state_;
    const float* const in_;
    float *const out_, *const gates_;
};

// Reads and writes the states. A tile is a slice of a row's head; those of the first slices also keep the last inputs of
// the convolution, which no other op of the layer reads after this one has begun.
class DeltaRule final : public Op {
   public:
    // `in` is that of `DeltaConv`, `conv` and `gates` are what it writes; `out` [tokens][values]
    DeltaRule(const delta::Layer& layer, const RowStates& state, const float* in, const float* conv,
              const float* gates, float* out)
        : Op("delta_rule"), layer_(layer), state_(state), in_(in), conv_(conv), gates_(gates), out_(out) {}

    int tiles(const Step& step) const override { return step.rows * layer_.value_heads * slices(); }

    void tile(const Step& step, int index, const Scratch&) override {
        const int slice = index % slices(), head = index / slices() % layer_.value_heads;
        const int row = index / slices() / layer_.value_heads;
        if (slice == 0) keep_inputs(step, row, head);
        const size_t size = size_t(layer_.key_dim) * delta::SLICE, place = (size_t(head) * slices() + slice) * size;
        const float* from = state_.read(row);
        float* to = state_.write(row) + place;
        if (from)
            from += place;
        else
            from = to, memset(to, 0, size * 4);
        const int key = layer_.key_head(head) * layer_.key_dim;
        const int value = head * layer_.value_dim + slice * delta::SLICE;
        for (int i = 0, token = step.offsets[row]; i < step.counts[row]; i++, token++) {
            const float* inputs = conv_ + size_t(token) * layer_.channels();
            const float* gate = gates_ + size_t(token) * 2 * layer_.value_heads + head;
            float* out = out_ + size_t(token) * layer_.values() + value;
            for (int c = 0; c < delta::SLICE; c += COLUMNS)
                absorb(from + c, to + c, inputs + key, inputs + layer_.keys() + key, inputs + 2 * layer_.keys() + value + c,
                       gate[0], gate[layer_.value_heads], out + c);
            from = to;
        }
    }

    // Each row's state is read and written once.
    Cost cost(const Step& step) const override {
        const double numbers = double(layer_.state());
        return {2.0 * step.rows * numbers * 4 + double(step.tokens) * (layer_.channels() + layer_.values()) * 4,
                7.0 * step.tokens * numbers};
    }

   private:
    static constexpr int COLUMNS = LANES == 16 ? 32 : 16;  // as many sums as there are registers for
    static constexpr int VECTORS = COLUMNS / LANES;
    int slices() const { return layer_.value_dim / delta::SLICE; }

    // One token, for some columns of the state.
    void absorb(const float* from, float* to, const float* query, const float* key, const float* value, float decay,
                float beta, float* out) const {
        vf sums[delta::CHAINS][VECTORS] = {};
        for (int k = 0; k < layer_.key_dim; k += delta::CHAINS)
            for (int i = 0; i < delta::CHAINS; i++)
                for (int j = 0; j < VECTORS; j++)
                    sums[i][j] = fma(load<vf>(from + (k + i) * delta::SLICE + j * LANES), splat(key[k + i]), sums[i][j]);
        vf change[VECTORS];
        for (int j = 0; j < VECTORS; j++)
            change[j] = (load<vf>(value + j * LANES) - total(sums, j) * decay) * beta;
        vf read[delta::CHAINS][VECTORS] = {};
        for (int k = 0; k < layer_.key_dim; k += delta::CHAINS)
            for (int i = 0; i < delta::CHAINS; i++)
                for (int j = 0; j < VECTORS; j++) {
                    const int at = (k + i) * delta::SLICE + j * LANES;
                    const vf next = fma(splat(key[k + i]), change[j], load<vf>(from + at) * decay);
                    store(to + at, next);
                    read[i][j] = fma(next, splat(query[k + i]), read[i][j]);
                }
        for (int j = 0; j < VECTORS; j++) store(out + j * LANES, total(read, j));
    }

    static vf total(const vf (&sums)[delta::CHAINS][VECTORS], int j) {
        static_assert(delta::CHAINS == 4);
        return (sums[0][j] + sums[1][j]) + (sums[2][j] + sums[3][j]);
    }

    // A head's share of the last inputs. The slot may be the one that was read: numbers move to the front.
    void keep_inputs(const Step& step, int row, int head) const {
        const int channels = layer_.channels(), count = step.counts[row];
        const int first = int(int64_t(channels) * head / layer_.value_heads);
        const int width = int(int64_t(channels) * (head + 1) / layer_.value_heads) - first;
        const float* before = state_.read(row);
        float* to = state_.write(row) + layer_.state() + first;
        for (int i = 0; i < delta::TAPS - 1; i++, to += channels) {
            const int at = count + i - (delta::TAPS - 1);
            if (at >= 0)
                memcpy(to, in_ + size_t(step.offsets[row] + at) * layer_.inputs() + first, width * 4);
            else if (before)
                memmove(to, before + layer_.state() + size_t(at + delta::TAPS - 1) * channels + first, width * 4);
            else
                memset(to, 0, width * 4);
        }
    }

    const delta::Layer layer_;
    const RowStates state_;
    const float *const in_, *const conv_, *const gates_;
    float* const out_;
};

// Rows times the sigmoids or softplus of others, in the form that the next product reads: the gate of attention's result.
class Gate final : public Op {
   public:
    // `from` [tokens][all] and `gates` [tokens][width / columns], which are those of `width` columns from `first` on, one
    // for `columns` adjacent ones. If these are not all, other ranks have the others: then the results stay in `from`
    // unless `out` is PLAIN.
    Gate(Rows out, ActivationForm form, float* from, const float* gates, int width, int first, int all, int columns,
         bool softplus)
        : Op("gate"), out_(out), form_(form), from_(from), gates_(gates), width_(width), first_(first), all_(all),
          columns_(columns), softplus_(softplus) {}

    int tiles(const Step& step) const override { return step.tokens; }
    size_t scratch_bytes() const override { return size_t(width_) * 4; }

    void tile(const Step& step, int token, const Scratch& scratch) override {
        float* from = from_ + size_t(token) * all_ + first_;
        const float* gates = gates_ + size_t(token) * (width_ / columns_);
        const bool is_part = width_ < all_;
        float* gated = is_part ? from : reinterpret_cast<float*>(scratch.memory);
        if (columns_ == 1) {
            for (int c = 0; c < width_; c += LANES) store(gated + c, times(load<vf>(from + c), load<vf>(gates + c)));
        } else {
            for (int first = 0; first < width_; first += columns_) {
                const vf gate = gates[first / columns_] - vf{};
                int c = first;
                for (; c + LANES <= first + columns_; c += LANES) store(gated + c, times(load<vf>(from + c), gate));
                for (; c < first + columns_; c++) {
                    const vf value = times(from[c] - vf{}, gate);
                    gated[c] = value[0];
                }
            }
        }
        if (form_ == ActivationForm::PLAIN)
            for (int c = 0; c < width_; c += LANES) store_acts(out_.plain(token) + first_ + c, load<vf>(gated + c));
        else if (!is_part)
            quantize(gated, out_, token, width_, form_);
        if (!is_part) row_is_written(step, token, scratch);
    }

    const uint8_t* rows_out() const override { return out_.data; }

    Cost cost(const Step& step) const override { return {double(step.tokens) * width_ * 12, 0}; }

   private:
    vf times(vf x, vf gate) const { return softplus_ ? x * delta::softplus(gate) : times_sigmoid(x, gate); }

    const Rows out_;
    const ActivationForm form_;
    float* const from_;
    const float* const gates_;
    const int width_, first_, all_, columns_;
    const bool softplus_;
};

// out = rms(o) w silu(z) for each head, in the form that the next product reads.
class DeltaNorm final : public Op {
   public:
    // `in` is that of `DeltaConv`, `values` what `DeltaRule` writes. If other ranks have some heads, the results go to
    // `wide` [tokens][values of all heads] unless `out` is PLAIN.
    DeltaNorm(const delta::Layer& layer, const float* in, const float* values, Rows out, ActivationForm form, float* wide)
        : Op("delta_norm"), layer_(layer), in_(in), values_(values), out_(out), form_(form), wide_(wide) {}

    int tiles(const Step& step) const override { return step.tokens; }
    size_t scratch_bytes() const override { return size_t(layer_.values()) * 4; }

    void tile(const Step& step, int token, const Scratch& scratch) override {
        const int width = layer_.values(), size = layer_.value_dim;
        const float* from = values_ + size_t(token) * width;
        const float* z = in_ + size_t(token) * layer_.inputs() + layer_.channels();
        float* scratch_row = reinterpret_cast<float*>(scratch.memory);
        float* wide = wide_ ? wide_ + size_t(token) * layer_.all_heads * size : nullptr;
        for (int head = 0; head < layer_.value_heads; head++) {
            const int first = head * size, to = layer_.place(head) * size;
            float* normed = wide ? wide + to : scratch_row + first;
            const float factor = 1.0f / std::sqrt(delta::squares(from + first, size) / float(size) + layer_.eps);
            for (int c = 0; c < size; c += LANES) {
                const vf gate = load<vf>(z + first + c);
                const vf value = load<vf>(from + first + c) * factor * load<vf>(layer_.norm + c);
                store(normed + c, value * times_sigmoid(gate, gate));
            }
            if (form_ == ActivationForm::PLAIN)
                for (int c = 0; c < size; c += LANES) store_acts(out_.plain(token) + to + c, load<vf>(normed + c));
        }
        if (wide) return;
        if (form_ != ActivationForm::PLAIN) quantize(scratch_row, out_, token, width, form_);
        row_is_written(step, token, scratch);
    }

    const uint8_t* rows_out() const override { return out_.data; }

    Cost cost(const Step& step) const override { return {double(step.tokens) * layer_.values() * 12, 0}; }

   private:
    const delta::Layer layer_;
    const float *const in_, *const values_;
    const Rows out_;
    const ActivationForm form_;
    float* const wide_;
};

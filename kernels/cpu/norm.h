// Norms of residual rows, left in the form that the next product reads. `Norm` is the RMS norm of most models (Zhang and
// Sennrich, 2019, arXiv:1910.07467).
#pragma once

#include <cstring>

#include "step.h"

class Norm final : public Op {
   public:
    // With `sampled`, row i of `out` is the norm of the i-th sampled token.
    Norm(Rows out, ActivationForm form, const float* residual, const float* weight, int width, float eps, bool sampled)
        : Op("norm"), out_(out), form_(form), residual_(residual), weight_(weight), width_(width), eps_(eps),
          sampled_(sampled) {}

    int tiles(const Step& step) const override { return sampled_ ? step.samples : step.tokens; }

    size_t scratch_bytes() const override { return width_ * 4; }

    void tile(const Step& step, int row, const Scratch& scratch) override {
        const float* from = residual_ + size_t(sampled_ ? step.sampled[row] : row) * width_;
        vf squares[4] = {};
        int i = 0;
        for (; i + 4 * LANES <= width_; i += 4 * LANES)
            for (int j = 0; j < 4; j++) {
                const vf value = load<vf>(from + i + j * LANES);
                squares[j] = fma(value, value, squares[j]);
            }
        float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
        for (; i < width_; i++) total += from[i] * from[i];
        const float factor = 1.0f / std::sqrt(total / float(width_) + eps_);
        if (form_ == ActivationForm::PLAIN) {
            act* to = out_.plain(row);
            int j = 0;
            for (; j + LANES <= width_; j += LANES)
                store_acts(to + j, load<vf>(from + j) * factor * load<vf>(weight_ + j));
            for (; j < width_; j++) to[j] = to_act(from[j] * factor * weight_[j]);
        } else {
            float* normed = reinterpret_cast<float*>(scratch.memory);
            for (int j = 0; j < width_; j++) normed[j] = from[j] * factor * weight_[j];
            quantize(normed, out_, row, width_, form_);
        }
        row_is_written(step, row, scratch);
    }

    const uint8_t* rows_out() const override { return sampled_ ? nullptr : out_.data; }

    Cost cost(const Step& step) const override { return {double(tiles(step)) * width_ * 8, 0}; }

   private:
    const Rows out_;
    const ActivationForm form_;
    const float *const residual_, *const weight_;
    const int width_;
    const float eps_;
    const bool sampled_;
};

// What a norm does to a row: RMS norm, layer norm (Ba et al., 2016, arXiv:1607.06450), or nothing.
enum class NormKind : int { RMS = 0, LAYER = 1, NONE = 2 };

struct NormWeights {
    NormKind kind;
    const float *weight, *bias;  // bias may be null
    float eps;

    // to = norm(from), float32; both may be the same.
    void apply(const float* from, float* to, int width) const {
        if (kind == NormKind::NONE) {
            if (to != from) memcpy(to, from, width * 4);
            return;
        }
        const float mean = kind == NormKind::LAYER ? total_of(from, width, 0.0f, false) / float(width) : 0.0f;
        const float factor = 1.0f / std::sqrt(total_of(from, width, mean, true) / float(width) + eps);
        for (int i = 0; i < width; i++) to[i] = (from[i] - mean) * factor * weight[i] + (bias ? bias[i] : 0.0f);
    }

   private:
    // The sum of a row's numbers minus `mean`, or of their squares.
    static float total_of(const float* from, int width, float mean, bool squared) {
        vf sums[4] = {};
        int i = 0;
        for (; i + 4 * LANES <= width; i += 4 * LANES)
            for (int j = 0; j < 4; j++) {
                const vf value = load<vf>(from + i + j * LANES) - mean;
                sums[j] = squared ? fma(value, value, sums[j]) : sums[j] + value;
            }
        float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
        for (; i < width; i++) total += squared ? (from[i] - mean) * (from[i] - mean) : from[i] - mean;
        return total;
    }
};

// A norm of any kind of residual rows, in the form that the next product reads.
class AnyNorm final : public Op {
   public:
    // With `sampled`, row i of `out` is the norm of the i-th sampled token.
    AnyNorm(Rows out, ActivationForm form, const float* residual, const NormWeights& norm, int width, bool sampled)
        : Op("norm"), out_(out), form_(form), residual_(residual), norm_(norm), width_(width), sampled_(sampled) {}

    int tiles(const Step& step) const override { return sampled_ ? step.samples : step.tokens; }
    size_t scratch_bytes() const override { return width_ * 4; }

    void tile(const Step& step, int row, const Scratch& scratch) override {
        float* normed = reinterpret_cast<float*>(scratch.memory);
        norm_.apply(residual_ + size_t(sampled_ ? step.sampled[row] : row) * width_, normed, width_);
        if (form_ == ActivationForm::PLAIN) {
            act* to = out_.plain(row);
            int j = 0;
            for (; j + LANES <= width_; j += LANES) store_acts(to + j, load<vf>(normed + j));
            for (; j < width_; j++) to[j] = to_act(normed[j]);
        } else {
            quantize(normed, out_, row, width_, form_);
        }
        row_is_written(step, row, scratch);
    }

    const uint8_t* rows_out() const override { return sampled_ ? nullptr : out_.data; }

    Cost cost(const Step& step) const override { return {double(tiles(step)) * width_ * 8, 0}; }

   private:
    const Rows out_;
    const ActivationForm form_;
    const float* const residual_;
    const NormWeights norm_;
    const int width_;
    const bool sampled_;
};

// residual = (residual + norm(from) * factor) * scale, or residual = norm(residual) without `from`.
class AddNorm final : public Op {
   public:
    AddNorm(float* residual, const float* from, const NormWeights& norm, int width, float factor, float scale = 1.0f,
            const RowShare& share = {})
        : Op("add_norm"), residual_(residual), from_(from), norm_(norm), width_(width), factor_(factor), scale_(scale),
          share_(share) {}

    int tiles(const Step& step) const override { return share_.size(step.tokens); }
    size_t scratch_bytes() const override { return width_ * 4; }

    void tile(const Step& step, int index, const Scratch& scratch) override {
        const int row = share_.first(step.tokens) + index;
        float* to = residual_ + size_t(row) * width_;
        if (!from_) {
            norm_.apply(to, to, width_);
            return;
        }
        float* normed = reinterpret_cast<float*>(scratch.memory);
        norm_.apply(from_ + size_t(row) * width_, normed, width_);
        for (int i = 0; i < width_; i++) to[i] += normed[i] * factor_;
        if (scale_ != 1.0f)
            for (int i = 0; i < width_; i++) to[i] *= scale_;
    }

    Cost cost(const Step& step) const override { return {double(step.tokens) * width_ * 12, 0}; }

   private:
    float* const residual_;
    const float* const from_;
    const NormWeights norm_;
    const int width_;
    const float factor_, scale_;
    const RowShare share_;
};

// Rows of float32 as codes in groups of 32.
class Quantize final : public Op {
   public:
    Quantize(Rows out, ActivationForm form, const float* from, int width, int rows_per_token = 1)
        : Op("quantize"), out_(out), form_(form), from_(from), width_(width), rows_per_token_(rows_per_token) {}

    int tiles(const Step& step) const override { return step.tokens * rows_per_token_; }

    void tile(const Step& step, int row, const Scratch& scratch) override {
        quantize(from_ + size_t(row) * width_, out_, row, width_, form_);
        row_is_written(step, row, scratch);
    }

    const uint8_t* rows_out() const override { return rows_per_token_ == 1 ? out_.data : nullptr; }

    Cost cost(const Step& step) const override { return {double(tiles(step)) * width_ * 5, 0}; }

   private:
    const Rows out_;
    const ActivationForm form_;
    const float* const from_;
    const int width_, rows_per_token_;
};

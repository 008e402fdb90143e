// RMS norm (Zhang and Sennrich, 2019, arXiv:1910.07467) of residual rows, left in the form that the next product reads.
#pragma once

#include "step.h"

class Norm final : public Op {
   public:
    // With `sampled`, row i of `out` is the norm of the i-th sampled token.
    Norm(Rows out, Form form, const float* residual, const float* weight, int width, float eps, bool sampled)
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
        if (form_ == Form::PLAIN) {
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
    }

    Cost cost(const Step& step) const override { return {double(tiles(step)) * width_ * 8, 0}; }

   private:
    const Rows out_;
    const Form form_;
    const float *const residual_, *const weight_;
    const int width_;
    const float eps_;
    const bool sampled_;
};

// Rows of float32 as codes in groups of 32.
class Quantize final : public Op {
   public:
    Quantize(Rows out, Form form, const float* from, int width)
        : Op("quantize"), out_(out), form_(form), from_(from), width_(width) {}

    int tiles(const Step& step) const override { return step.tokens; }

    void tile(const Step&, int row, const Scratch&) override {
        quantize(from_ + size_t(row) * width_, out_, row, width_, form_);
    }

    Cost cost(const Step& step) const override { return {double(step.tokens) * width_ * 5, 0}; }

   private:
    const Rows out_;
    const Form form_;
    const float* const from_;
    const int width_;
};

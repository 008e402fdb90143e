// The pixels of images as activations.
#pragma once

#include "step.h"

// What is subtracted from a byte: CENTER in kernels/patches.py. Differences are exact in bfloat16, and small.
constexpr float PIXEL_CENTER = 128.0f;

// out = pixels - PIXEL_CENTER, of bytes [tokens][width]: plain activations, for a matrix of floats.
class Patches final : public Op {
   public:
    Patches(Rows out, const uint8_t* pixels, int width) : Op("patches"), out_(out), pixels_(pixels), width_(width) {}

    int tiles(const Step& step) const override { return step.tokens; }

    void tile(const Step& step, int token, const Scratch& scratch) override {
        const uint8_t* from = pixels_ + size_t(token) * width_;
        act* to = out_.plain(token);
        int i = 0;
        for (; i + LANES <= width_; i += LANES)
            store_acts(to + i, __builtin_convertvector(load_bytes(from + i), vf) - PIXEL_CENTER);
        for (; i < width_; i++) to[i] = to_act(float(from[i]) - PIXEL_CENTER);
        row_is_written(step, token, scratch);
    }

    const uint8_t* rows_out() const override { return out_.data; }

    Cost cost(const Step& step) const override { return {double(step.tokens) * width_ * 3, 0}; }

   private:
    const Rows out_;
    const uint8_t* const pixels_;
    const int width_;
};

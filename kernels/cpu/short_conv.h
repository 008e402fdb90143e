// A short convolution in place of attention (LFM2): out = c * conv(b * x) of each channel, without an activation.
//
// The state of a row is its last products b * x, [taps - 1][channels] in a slot, float32. Each number has one order of
// operations, whatever the chunk, the rows beside it and the number of threads.
#pragma once

#include <algorithm>

#include "activation.h"
#include "states.h"
#include "step.h"

// A tile is some channels of a row: it has read their state before it writes it, which may be the same slot.
class ShortConv final : public Op {
   public:
    static constexpr int MAX_TAPS = 8;

    // `in` [tokens][b, c, x of all channels], `weights` [taps][channels], of which the last one is that of the token
    // itself. `channels` is a multiple of 16. `out` has activations, or `floats` that are quantized afterwards.
    ShortConv(const RowStates& state, const float* in, const float* weights, int channels, int taps, Rows out, bool floats)
        : Op("short_conv"), state_(state), in_(in), weights_(weights), channels_(channels), taps_(taps), out_(out),
          floats_(floats) {}

    int tiles(const Step& step) const override { return step.rows * parts(); }

    void tile(const Step& step, int index, const Scratch&) override {
        const int row = index / parts(), first = index % parts() * PART;
        const int width = std::min(PART, channels_ - first), kept = taps_ - 1;
        float products[MAX_TAPS][PART];  // those of the last tokens, in a ring
        const float* before = state_.read(row);
        for (int i = 0; i < kept; i++)
            for (int c = 0; c < width; c += LANES)
                store(products[i] + c, before ? load<vf>(before + size_t(i) * channels_ + first + c) : vf{});
        int place = kept;  // of the token's own product
        for (int i = 0, token = step.offsets[row]; i < step.counts[row]; i++, token++) {
            const float* b = in_ + size_t(token) * 3 * channels_ + first;
            for (int c = 0; c < width; c += LANES) {
                store(products[place] + c, load<vf>(b + c) * load<vf>(b + 2 * channels_ + c));
                vf total{};
                for (int tap = 0; tap < taps_; tap++) {
                    const float* product = products[(place + 1 + tap) % taps_] + c;
                    total = fma(load<vf>(product), load<vf>(weights_ + size_t(tap) * channels_ + first + c), total);
                }
                const vf value = load<vf>(b + channels_ + c) * total;
                if (floats_)
                    store(reinterpret_cast<float*>(out_.data + token * out_.stride) + first + c, value);
                else
                    store_acts(out_.plain(token) + first + c, value);
            }
            place = (place + 1) % taps_;
        }
        float* after = state_.write(row);
        for (int i = 0; i < kept; i++)
            for (int c = 0; c < width; c += LANES)
                store(after + size_t(i) * channels_ + first + c, load<vf>(products[(place + 1 + i) % taps_] + c));
    }

    Cost cost(const Step& step) const override {
        const double tokens = double(step.tokens) * 4, kept = 2.0 * step.rows * (taps_ - 1);
        return {(tokens + kept) * channels_ * 4, 0};
    }

   private:
    static constexpr int PART = 64;  // channels
    int parts() const { return ceil_div(channels_, PART); }

    const RowStates state_;
    const float *const in_, *const weights_;
    const int channels_, taps_;
    const Rows out_;
    const bool floats_;
};

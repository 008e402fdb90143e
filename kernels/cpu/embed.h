// Writes the embeddings of a step's ids to the float32 residual, and adds learned positions. A tied embedding reads the head's packed weights.
#pragma once

#include "step.h"

class Embed final : public Op {
   public:
    Embed(float* residual, const Matrix& table, float scale = 1.0f)
        : Op("embed"), residual_(residual), table_(table), scale_(scale) {}

    int tiles(const Step& step) const override { return step.tokens; }

    void tile(const Step& step, int token, const Scratch&) override {
        float* to = residual_ + size_t(token) * table_.depth;
        unpack(table_, int(step.ids[token]), to);
        if (scale_ != 1.0f)
            for (int i = 0; i < table_.depth; i++) to[i] *= scale_;
    }

    Cost cost(const Step& step) const override { return {double(step.tokens) * table_.depth * 6, 0}; }

   private:
    float* const residual_;
    const Matrix table_;
    const float scale_;
};

// residual += table[position + offset]
class AddPositions final : public Op {
   public:
    AddPositions(float* residual, const Matrix& table, int offset)
        : Op("positions"), residual_(residual), table_(table), offset_(offset) {}

    int tiles(const Step& step) const override { return step.tokens; }
    size_t scratch_bytes() const override { return size_t(table_.depth) * 4; }

    void tile(const Step& step, int token, const Scratch& scratch) override {
        float* row = reinterpret_cast<float*>(scratch.memory);
        unpack(table_, int(step.positions[token]) + offset_, row);
        float* to = residual_ + size_t(token) * table_.depth;
        for (int i = 0; i < table_.depth; i++) to[i] += row[i];
    }

    Cost cost(const Step& step) const override { return {double(step.tokens) * table_.depth * 10, 0}; }

   private:
    float* const residual_;
    const Matrix table_;
    const int offset_;
};

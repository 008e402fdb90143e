// Writes the embeddings of a step's ids to the float32 residual. A tied embedding reads the head's packed weights.
#pragma once

#include "step.h"

class Embed final : public Op {
   public:
    Embed(float* residual, const Matrix& table) : Op("embed"), residual_(residual), table_(table) {}

    int tiles(const Step& step) const override { return step.tokens; }

    void tile(const Step& step, int token, const Scratch&) override {
        unpack(table_, int(step.ids[token]), residual_ + size_t(token) * table_.depth);
    }

    Cost cost(const Step& step) const override { return {double(step.tokens) * table_.depth * 6, 0}; }

   private:
    float* const residual_;
    const Matrix table_;
};

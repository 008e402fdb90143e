// Writes the embeddings of a step's ids to the float32 residual, and adds learned positions. A tied embedding reads the head's packed weights.
// An id ~i stands for row i of the encoder cache. What a row has beyond a residual is added behind the first layers.
#pragma once

#include "step.h"

class Embed final : public Op {
   public:
    // The table has the rows of the ids from `first` to before `end`. Tokens with other ids are other ranks'; the first
    // one has `encoded`, the rows of the encoder cache, and so the tokens with negative ids; the others have null.
    Embed(float* residual, const Matrix& table, float scale, const float* encoded, int stride, int first, int end)
        : Op("embed"), residual_(residual), table_(table), scale_(scale), encoded_(encoded), stride_(stride),
          first_(first), end_(end) {}

    int tiles(const Step& step) const override { return step.tokens; }

    void tile(const Step& step, int token, const Scratch&) override {
        const int id = int(step.ids[token]);
        float* to = residual_ + size_t(token) * table_.depth;
        if (id < 0 && encoded_) {
            std::memcpy(to, encoded_ + size_t(~id) * stride_, size_t(table_.depth) * 4);
            return;
        }
        if (id < first_ || id >= end_) return;
        unpack(table_, id - first_, to);
        if (scale_ != 1.0f)
            for (int i = 0; i < table_.depth; i++) to[i] *= scale_;
    }

    Cost cost(const Step& step) const override { return {double(step.tokens) * table_.depth * 6, 0}; }

   private:
    float* const residual_;
    const Matrix table_;
    const float scale_;
    const float* const encoded_;
    const int stride_;
    const int first_, end_;
};

// residual += encoded[~id], of the tokens with negative ids
class AddEncoded final : public Op {
   public:
    AddEncoded(float* residual, int width, const float* encoded, int stride)
        : Op("encoded"), residual_(residual), width_(width), encoded_(encoded), stride_(stride) {}

    int tiles(const Step& step) const override { return step.tokens; }

    void tile(const Step& step, int token, const Scratch&) override {
        const int id = int(step.ids[token]);
        if (id >= 0) return;
        float* to = residual_ + size_t(token) * width_;
        const float* from = encoded_ + size_t(~id) * stride_;
        for (int i = 0; i < width_; i++) to[i] += from[i];
    }

    Cost cost(const Step& step) const override { return {double(step.tokens) * width_ * 12, 0}; }

   private:
    float* const residual_;
    const int width_;
    const float* const encoded_;
    const int stride_;
};

// residual += table[rows[token] + offset]
class AddPositions final : public Op {
   public:
    // Of the tokens that `Embed` computes.
    AddPositions(float* residual, const Matrix& table, int offset, const int64_t* rows, int first = 0, int end = INT32_MAX)
        : Op("positions"), residual_(residual), table_(table), offset_(offset), rows_(rows), first_(first), end_(end) {}

    int tiles(const Step& step) const override { return step.tokens; }
    size_t scratch_bytes() const override { return size_t(table_.depth) * 4; }

    void tile(const Step& step, int token, const Scratch& scratch) override {
        if (step.ids[token] >= end_ || (step.ids[token] < first_ && (first_ || step.ids[token] >= 0))) return;
        float* row = reinterpret_cast<float*>(scratch.memory);
        unpack(table_, int(rows_[token]) + offset_, row);
        float* to = residual_ + size_t(token) * table_.depth;
        for (int i = 0; i < table_.depth; i++) to[i] += row[i];
    }

    Cost cost(const Step& step) const override { return {double(step.tokens) * table_.depth * 10, 0}; }

   private:
    float* const residual_;
    const Matrix table_;
    const int offset_;
    const int64_t* const rows_;
    const int first_, end_;
};

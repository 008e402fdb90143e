// Matmuls with a weight matrix, fused with the next op on a tile of outputs while it is in the cache: adding the
// residual, silu(gate) x up, rotary embedding and writing the KV cache, the largest logit.
#pragma once

#include <algorithm>

#include "gemm_amx.h"
#include "step.h"

// A tile is `panels_` panels of outputs, for all rows. Derived ops process the rows of a tile.
class Gemm : public Op {
   public:
    Gemm(const char* name, Rows in, const Matrix& matrix, int panels)
        : Op(name), in_(in), matrix_(matrix), panels_(panels) {}

    int tiles(const Step& step) const override {
        return rows(step) ? ceil_div(matrix_.columns / PANEL, panels_) : 0;
    }

    size_t scratch_bytes() const override { return size_t(MOST_PART_ROWS) * panels_ * PANEL * 4; }

    void tile(const Step& step, int index, const Scratch& scratch) override {
        const int first = index * panels_, last = matrix_.columns / PANEL;
        const int panels = first + panels_ < last ? panels_ : last - first;
        const int width = panels * PANEL, num_rows = rows(step);
        float* values = reinterpret_cast<float*>(scratch.memory);
        const int part = part_rows(matrix_, num_rows);
        for (int row = 0; row < num_rows; row += part) {
            const int count = std::min(part, num_rows - row);
            // The first rows prefetch the next tile.
            const int next = scratch.next * panels_;
            const uint8_t* ahead = row == 0 && next + panels <= last ? panel(next) : nullptr;
            matmul(in_, row, count, matrix_, first, panels, values, width, ahead);
            for (int r = 0; r < count; r++) {
                float* at = values + r * width;
                if (matrix_.bias)
                    for (int c = 0; c < width; c++) at[c] += matrix_.bias[first * PANEL + c];
                finish(step, row + r, first * PANEL, width, at, scratch);
            }
        }
    }

    Cost cost(const Step& step) const override {
        const double num_rows = rows(step), outputs = matrix_.columns;
        return {matrix_.panel_bytes() * (outputs / PANEL) + num_rows * (matrix_.depth + outputs) * 4,
                2.0 * num_rows * outputs * matrix_.depth, matrix_.integer()};
    }

    bool prefetch_tile(const Step& step, int index) const override {
        if (index >= tiles(step)) return false;
        prefetch<L2>(panel(index * panels_), int(panels_ * matrix_.panel_bytes()));
        return true;
    }

   protected:
    const uint8_t* panel(int index) const { return matrix_.panels + index * matrix_.panel_bytes(); }

    virtual int rows(const Step& step) const { return step.tokens; }
    virtual void finish(const Step& step, int row, int column, int width, float* values, const Scratch& scratch) = 0;

    const Rows in_;
    const Matrix matrix_;
    const int panels_;
};

// residual += in x matrix
class LinearAdd final : public Gemm {
   public:
    LinearAdd(float* residual, Rows in, const Matrix& matrix, int width)
        : Gemm("linear_add", in, matrix, 2), residual_(residual), width_(width) {}

   private:
    void finish(const Step&, int row, int column, int width, float* values, const Scratch&) override {
        float* to = residual_ + size_t(row) * width_ + column;
        const int count = column + width <= width_ ? width : width_ - column;
        for (int c = 0; c < count; c++) to[c] += values[c];
    }

    float* const residual_;
    const int width_;
};

// silu(gate) * up; zero below the range of exp_of, where silu is zero in float32.
template <class Vector>
INLINE Vector silu_mul(Vector gate, Vector up) {
    return gate < -88.0f ? Vector{} : gate / (1.0f + exp_of(-gate)) * up;
}

// out = silu(in x gate) * (in x up). A panel holds eight outputs of gate and the eight of up beside them.
class Swiglu final : public Gemm {
   public:
    // `out` is plain activations; with `floats`, float32 on every ISA.
    Swiglu(Rows out, bool floats, Rows in, const Matrix& matrix)
        : Gemm("swiglu", in, matrix, 4), out_(out), floats_(floats) {}

   private:
    void finish(const Step&, int row, int column, int width, float* values, const Scratch&) override {
        float gated[4 * PANEL / 2];
        int c = 0;
#if defined(ISA_AVX512)
        for (; c + 2 * PANEL <= width; c += 2 * PANEL) {  // two panels fill a vector
            const vf first = load<vf>(values + c), second = load<vf>(values + c + PANEL);
            store(gated + c / 2, silu_mul(low_halves(first, second), high_halves(first, second)));
        }
#endif
        for (; c < width; c += PANEL)
            for (int i = 0; i < PANEL / 2; i += HALF_PANEL) {
                const half_panel gate = load<half_panel>(values + c + i), up = load<half_panel>(values + c + 8 + i);
                store(gated + c / 2 + i, silu_mul(gate, up));
            }
        if (floats_) {
            memcpy(reinterpret_cast<float*>(out_.data + row * out_.stride) + column / 2, gated, width / 2 * 4);
        } else {
            act* to = out_.plain(row) + column / 2;
            for (int c = 0; c < width / 2; c++) to[c] = to_act(gated[c]);
        }
    }

    const Rows out_;
    const bool floats_;
};

// The layout of a layer's keys and values. A block of a head is one panel of keys, 16 tokens wide and head_dim deep,
// and head_dim / 16 panels of values, 16 tokens deep:
//
//     [blocks]{ [heads][head_dim / 2][16 tokens][2] keys | [heads][head_dim / 16][8][16][2] values }
struct KV {
    uint16_t* data;
    int heads, head_dim;

    size_t head_size() const { return size_t(head_dim) * BLOCK; }
    uint16_t* keys(int64_t block, int head) const { return data + (2 * block * heads + head) * head_size(); }
    uint16_t* values(int64_t block, int head) const { return data + ((2 * block + 1) * heads + head) * head_size(); }
};

// Weights [head_dim] of an RMS norm of each head's queries and keys, or nulls. In the order of the head's numbers
// below.
struct HeadNorms {
    const float *query = nullptr, *key = nullptr;
    float eps = 0;
};

// Queries, keys and values: queries and keys through their norms where a model has such, then turned by their positions
// (Su et al., 2021, arXiv:2104.09864), the queries scaled and left for attention, keys and values written to the cache.
// A tile is one head.
//
// The numbers of a head of queries or keys come in another order, the same for both, so that their products stay what
// they were: in a panel, eight of the first half and the eight of the second half that they turn with.
class Qkv final : public Gemm {
   public:
    Qkv(float* queries, Rows in, const Matrix& matrix, int num_heads, const KV& kv, const float* cos, const float* sin,
        const HeadNorms& norms)
        : Gemm("qkv", in, matrix, kv.head_dim / PANEL), queries_(queries), num_heads_(num_heads), kv_(kv),
          cos_(cos), sin_(sin), norms_(norms), scale_(1.0f / std::sqrt(float(kv.head_dim))) {}

   private:
    void finish(const Step& step, int row, int column, int, float* values, const Scratch&) override {
        const int head = column / kv_.head_dim, dim = kv_.head_dim;
        const int64_t block = step.slots[row] / BLOCK, place = step.slots[row] % BLOCK;
        if (head >= num_heads_ + kv_.heads) {
            uint16_t* to = kv_.values(block, head - num_heads_ - kv_.heads) + place / 2 * PANEL * 2 + place % 2;
            for (int panel = 0; panel < dim / PANEL; panel++)
                for (int c = 0; c < PANEL; c++)
                    to[panel * PANEL * BLOCK + 2 * c] = to_bf16(values[panel * PANEL + c]);
            return;
        }
        if (const float* weight = head < num_heads_ ? norms_.query : norms_.key) {
            vf squares{};
            for (int c = 0; c < dim; c += LANES) {
                const vf value = load<vf>(values + c);
                squares = fma(value, value, squares);
            }
            const float factor = 1.0f / std::sqrt(sum(squares) / float(dim) + norms_.eps);
            for (int c = 0; c < dim; c++) values[c] = values[c] * factor * weight[c];
        }
        const float* cos = cos_ + step.positions[row] * (dim / 2);
        const float* sin = sin_ + step.positions[row] * (dim / 2);
        for (int c = 0; c < dim; c += PANEL) {
            const f8 a = load<f8>(values + c), b = load<f8>(values + c + 8);
            const f8 cosine = load<f8>(cos + c / 2), sine = load<f8>(sin + c / 2);
            store(values + c, a * cosine - b * sine);
            store(values + c + 8, b * cosine + a * sine);
        }
        if (head < num_heads_) {
            float* to = queries_ + size_t(row) * num_heads_ * dim + column;
            for (int c = 0; c < dim; c++) to[c] = values[c] * scale_;
        } else {
            uint16_t* to = kv_.keys(block, head - num_heads_) + place * 2;
            for (int c = 0; c < dim; c += 2) {
                to[c * BLOCK] = to_bf16(values[c]);
                to[c * BLOCK + 1] = to_bf16(values[c + 1]);
            }
        }
    }

    float* const queries_;
    const int num_heads_;
    const KV kv_;
    const float *const cos_, *const sin_;
    const HeadNorms norms_;
    const float scale_;
};

// The largest logit of a row that a thread has computed.
struct Best {
    float value;
    int32_t id;
};
constexpr Best NO_BEST = {-INFINITY, -1};

// Logits of the sampled tokens. Of a row that is greedy and nothing else only the largest is kept; others are written.
// `greedy` may be null, where none is.
class Head final : public Gemm {
   public:
    Head(float* logits, Best* best, int max_samples, Rows in, const Matrix& matrix, int vocab_size,
         const uint8_t* greedy)
        : Gemm("head", in, matrix, 4), logits_(logits), best_(best), max_samples_(max_samples),
          vocab_size_(vocab_size), greedy_(greedy) {}

   private:
    int rows(const Step& step) const override { return step.samples; }

    void finish(const Step&, int row, int column, int width, float* values, const Scratch& scratch) override {
        const int count = column + width <= vocab_size_ ? width : vocab_size_ - column;
        if (!greedy_ || !greedy_[row]) {
            memcpy(logits_ + size_t(row) * vocab_size_ + column, values, count * 4);
            return;
        }
        Best& best = best_[size_t(scratch.thread) * max_samples_ + row];
        int c = 0;
        vf tops = splat(-INFINITY);
        for (; c + LANES <= count; c += LANES) tops = max(tops, load<vf>(values + c));
        float top = largest(tops);
        for (; c < count; c++) top = values[c] > top ? values[c] : top;
        if (!(top > best.value || (top == best.value && column < best.id))) return;
        for (c = 0; c < count - 1 && values[c] != top; c++) {}
        best = {top, column + c};
    }

    float* const logits_;
    Best* const best_;
    const int max_samples_, vocab_size_;
    const uint8_t* const greedy_;
};

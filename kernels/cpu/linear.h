// Matmuls with a weight matrix, fused with the next op on a tile of outputs while it is in the cache: adding the
// residual, silu(gate) x up, the largest logit. qkv.h has another.
#pragma once

#include <algorithm>

#include "gemm_amx.h"
#include "step.h"

constexpr int LEAST_ROWS_TO_PREFETCH = 33;  // fewer rows write too little to wait for

INLINE void prefetch_to_write(const void* at, int bytes) {
    for (int i = 0; i < bytes; i += LINE) __builtin_prefetch(static_cast<const uint8_t*>(at) + i, 1, L1);
}

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
        const int most = part_rows(matrix_, num_rows);
        for (int row = 0; row < num_rows; row += most) {
            const int count = std::min(most, num_rows - row);
            // The first rows prefetch the next tile.
            const int next = scratch.next * panels_;
            const uint8_t* ahead = row == 0 && next + panels <= last ? panel(next) : nullptr;
            const Part part{row, count, first * PANEL, width, values};
            if (num_rows >= LEAST_ROWS_TO_PREFETCH) prefetch_out(step, part);
            matmul(in_, row, count, matrix_, first, panels, values, width, ahead);
            if (matrix_.bias)
                for (int r = 0; r < count; r++)
                    for (int c = 0; c < width; c++) values[r * width + c] += matrix_.bias[first * PANEL + c];
            finish(step, part, scratch);
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

    // Some rows of a tile: values [count][width], of the rows from `row` and the outputs from `column` on.
    struct Part {
        int row, count, column, width;
        float* values;
    };

    virtual void finish(const Step& step, const Part& part, const Scratch& scratch) = 0;

    // Fetches the lines that `finish` writes, while the matmul computes. Other threads have read them since they were
    // written last, so each write would wait for the other core.
    virtual void prefetch_out(const Step&, const Part&) const {}

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
    float* at(const Part& part, int r) const { return residual_ + size_t(part.row + r) * width_ + part.column; }

    void prefetch_out(const Step&, const Part& part) const override {
        for (int r = 0; r < part.count; r++) prefetch_to_write(at(part, r), part.width * 4);
    }

    void finish(const Step&, const Part& part, const Scratch&) override {
        const int width = std::min(part.width, width_ - part.column);
        for (int r = 0; r < part.count; r++) {
            float* to = at(part, r);
            const float* values = part.values + r * part.width;
            int c = 0;
            for (; c + LANES <= width; c += LANES) store(to + c, load<vf>(to + c) + load<vf>(values + c));
            for (; c < width; c++) to[c] += values[c];
        }
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
    void prefetch_out(const Step&, const Part& part) const override {
        const int size = floats_ ? sizeof(float) : sizeof(act);
        for (int r = 0; r < part.count; r++)
            prefetch_to_write(out_.data + (part.row + r) * out_.stride + part.column / 2 * size, part.width / 2 * size);
    }

    void finish(const Step&, const Part& part, const Scratch&) override {
        const int width = part.width, column = part.column / 2;
        for (int r = 0; r < part.count; r++) {
            const float* values = part.values + r * width;
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
                memcpy(reinterpret_cast<float*>(out_.data + (part.row + r) * out_.stride) + column, gated, width / 2 * 4);
            } else {
                act* to = out_.plain(part.row + r) + column;
                int c = 0;
                for (; c + LANES <= width / 2; c += LANES) store_acts(to + c, load<vf>(gated + c));
                for (; c < width / 2; c++) to[c] = to_act(gated[c]);
            }
        }
    }

    const Rows out_;
    const bool floats_;
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

    void finish(const Step&, const Part& part, const Scratch& scratch) override {
        for (int r = 0; r < part.count; r++)
            finish_row(part.row + r, part.column, part.width, part.values + r * part.width, scratch);
    }

    void finish_row(int row, int column, int width, const float* values, const Scratch& scratch) const {
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

// Matmuls with a weight matrix, fused with the next op on a tile of outputs while it is in the cache: adding the
// residual, silu(gate) x up, the largest logit. qkv.h has another.
#pragma once

#include <algorithm>
#include <vector>

#include "activation.h"
#include "gemm_amx.h"
#include "lora.h"
#include "routing.h"
#include "step.h"

constexpr int LEAST_ROWS_TO_PREFETCH = 33;  // fewer rows write too little to wait for

INLINE void prefetch_to_write(const void* at, int bytes) {
    for (int i = 0; i < bytes; i += LINE) __builtin_prefetch(static_cast<const uint8_t*>(at) + i, 1, L1);
}

// A matrix, and the activations that it is multiplied with.
struct Product {
    Matrix matrix;
    Rows in;
};

// A tile is `panels_` panels of outputs, for all rows. Derived ops process the rows of a tile. The outputs may come from
// several matrices, one below the other, because those of one layer may have different formats.
//
// With `routing`, each matrix is those of all experts, one below the other. A tile has the rows of one expert, of those
// that have any, and rows are in expert order.
class Gemm : public Op {
   public:
    Gemm(const char* name, Rows in, const Matrix& matrix, int panels, const Routing* routing = nullptr)
        : Op(name), products_{Product{matrix, in}}, panels_(panels), routing_(routing) {}

    // Each matrix but the last has whole tiles.
    Gemm(const char* name, const Product* products, int num_products, int panels, const Routing* routing = nullptr)
        : Op(name), products_(products, products + num_products), panels_(panels), routing_(routing) {}

    // Lets adapters change the results.
    void adapt(const LoraSite* site) { lora_ = site; }

    int tiles(const Step& step) const override {
        if (!rows(step)) return 0;
        return routing_ ? routing_->num_active.load(std::memory_order_relaxed) * tiles_each() : tiles_each();
    }

    size_t scratch_bytes() const override {
        size_t bytes = 0;
        for (const Product& product : products_) bytes = std::max(bytes, unpacked_bytes(product.matrix));
        return value_bytes() + bytes;
    }

    void tile(const Step& step, int index, const Scratch& scratch) override {
        const Tile now = tile_of(step, index), next = tile_of(step, scratch.next);
        const int num_rows = now.num_rows;
        int width = 0, most = 0;
        for (int i = 0; i < now.num_pieces; i++) {
            width += now.pieces[i].panels * PANEL;
            most = std::max(most, part_rows(products_[now.pieces[i].product].matrix, num_rows));
        }
        float* values = reinterpret_cast<float*>(scratch.memory);
        for (int row = 0; row < num_rows; row += most) {
            const Part part{now.row + row, std::min(most, num_rows - row), now.column, width, values};
            if (num_rows >= LEAST_ROWS_TO_PREFETCH) prefetch_out(step, part);
            const bool is_adapted = lora_ && *step.num_adapted;
            float* to = values;
            for (int i = 0; i < now.num_pieces; i++) {
                // The first rows prefetch the next tile.
                const Piece& piece = now.pieces[i];
                const bool goes_on = row == 0 && i < next.num_pieces && next.pieces[i].product == piece.product &&
                                     next.pieces[i].panels == piece.panels;
                const uint8_t* ahead = goes_on ? panel(next.pieces[i]) : nullptr;
                uint8_t* wide = scratch.memory + value_bytes();
                if (is_adapted)
                    multiply_adapted(step, index, piece, part, to, ahead, wide, scratch);
                else
                    multiply_piece(piece, products_[piece.product].matrix, part, to, ahead, wide);
                if (is_adapted)
                    lora_->add(step, piece.product, int(products_.size()), piece.first, piece.panels, part.row, part.count,
                               to, part.width);
                to += piece.panels * PANEL;
            }
            finish(step, part, scratch);
        }
    }

    Cost cost(const Step& step) const override {
        const double num_rows = routing_ ? rows(step) * routing_->per_token : rows(step);
        const double active = routing_ ? routing_->num_active.load(std::memory_order_relaxed) : 1;
        Cost cost{0, 0, true};
        for (const Product& product : products_) {
            const Matrix& matrix = product.matrix;
            const double outputs = matrix.columns / num_experts();
            cost.bytes += active * matrix.panel_bytes() * (outputs / PANEL) + num_rows * outputs * 4;
            cost.flops += 2.0 * num_rows * outputs * matrix.depth;
            cost.integer = cost.integer && matrix.integer();
        }
        cost.bytes += num_rows * products_[0].matrix.depth * 4;
        return cost;
    }

    bool prefetch_tile(const Step& step, int index) const override {
        // Which experts will have rows is not known yet.
        if (routing_ || index >= tiles(step)) return false;
        const Tile tile = tile_of(step, index);
        for (int i = 0; i < tile.num_pieces; i++) {
            const Piece& piece = tile.pieces[i];
            prefetch<L2>(panel(piece), int(piece.panels * products_[piece.product].matrix.panel_bytes()));
        }
        return true;
    }

   protected:
    // Some panels of a matrix.
    struct Piece {
        int product, first, panels;
    };

    // The panels of a tile, its first output, and its rows. No pieces: there is no such tile.
    struct Tile {
        int num_pieces = 0, column = 0, row = 0, num_rows = 0;
        Piece pieces[2];
    };

    int num_experts() const { return routing_ ? routing_->experts : 1; }

    // Panels of a matrix; of one expert.
    int num_panels(int product) const { return products_[product].matrix.columns / PANEL / num_experts(); }

    // Tiles of one expert.
    virtual int tiles_each() const {
        int tiles = 0;
        for (size_t i = 0; i < products_.size(); i++) tiles += ceil_div(num_panels(int(i)), panels_);
        return tiles;
    }

    Tile tile_of(const Step& step, int index) const {
        if (!routing_) {
            Tile tile = tile_at(index);
            tile.num_rows = rows(step);
            return tile;
        }
        const int each = tiles_each(), place = index / each;
        if (place >= routing_->num_active.load(std::memory_order_relaxed)) return {};
        Tile tile = tile_at(index % each);
        tile.row = routing_->begin[place], tile.num_rows = routing_->begin[place + 1] - tile.row;
        for (int i = 0; i < tile.num_pieces; i++)
            tile.pieces[i].first += routing_->active[place] * num_panels(tile.pieces[i].product);
        return tile;
    }

    // The panels of a tile; of one expert, as if there were no others.
    virtual Tile tile_at(int index) const {
        Tile tile;
        for (size_t i = 0; i < products_.size(); i++) {
            const int panels = num_panels(int(i)), tiles = ceil_div(panels, panels_);
            if (index < tiles) {
                const int first = index * panels_;
                tile.column += first * PANEL;
                tile.num_pieces = 1;
                tile.pieces[0] = {int(i), first, std::min(panels_, panels - first)};
                break;
            }
            index -= tiles;
            tile.column += panels * PANEL;
        }
        return tile;
    }

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

    const std::vector<Product> products_;
    const int panels_;
    const Routing* const routing_;
    const LoraSite* lora_ = nullptr;

   private:
    const uint8_t* panel(const Piece& piece) const {
        const Matrix& matrix = products_[piece.product].matrix;
        return matrix.panels + piece.first * matrix.panel_bytes();
    }

    size_t value_bytes() const { return size_t(MOST_PART_ROWS) * panels_ * PANEL * 4; }

    // Fetches what adapters need meanwhile: their B of these panels, and a part of the A of the next matmul.
    void multiply_adapted(const Step& step, int index, const Piece& piece, const Part& part, float* to,
                          const uint8_t* ahead, uint8_t* wide, const Scratch& scratch) const {
        Matrix matrix = products_[piece.product].matrix;
        Lines lines;
        lora_->add_lines(step, piece.product, int(products_.size()), piece.first, piece.panels, part.row, part.count, lines);
        if (const int fetches = line_fetches(matrix, part.count, piece.panels)) {
            const int num = ceil_div(tiles(step), scratch.threads), begin = int(int64_t(tiles(step)) * scratch.thread / scratch.threads);
            if (lora_->next && part.row == 0 && index >= begin && index < begin + num)
                lora_->next->add_lines(step, scratch.thread, scratch.threads, index - begin, num, lines);
            lines.spread(fetches);
            matrix.lines = &lines;
        } else {
            lines.fetch_rest();
        }
        multiply_piece(piece, matrix, part, to, ahead, wide);
        lines.fetch_rest();
    }

    void multiply_piece(const Piece& piece, const Matrix& matrix, const Part& part, float* to, const uint8_t* ahead,
                        uint8_t* wide) const {
        const Rows& in = products_[piece.product].in;
        const int most = part_rows(matrix, part.count), width = piece.panels * PANEL;
        for (int r = 0; r < part.count; r += most) {
            const int count = std::min(most, part.count - r);
            matmul(in, part.row + r, count, matrix, piece.first, piece.panels, to + r * part.width,
                   part.width, r ? nullptr : ahead, wide);
        }
        if (const float* bias = matrix.bias)
            for (int r = 0; r < part.count; r++)
                for (int c = 0; c < width; c++) to[r * part.width + c] += bias[piece.first * PANEL + c];
    }
};

// residual += in x matrix * factor. Rows of the residual are `stride` numbers apart, of which `width` are changed.
class LinearAdd final : public Gemm {
   public:
    LinearAdd(float* residual, Rows in, const Matrix& matrix, int width, int stride, float factor = 1.0f)
        : Gemm("linear_add", in, matrix, 2), residual_(residual), width_(width), stride_(stride), factor_(factor) {}

   private:
    float* at(const Part& part, int r) const { return residual_ + size_t(part.row + r) * stride_ + part.column; }

    void prefetch_out(const Step&, const Part& part) const override {
        for (int r = 0; r < part.count; r++) prefetch_to_write(at(part, r), part.width * 4);
    }

    void finish(const Step&, const Part& part, const Scratch&) override {
        const int width = std::min(part.width, width_ - part.column);
        for (int r = 0; r < part.count; r++) {
            float* to = at(part, r);
            float* values = part.values + r * part.width;
            if (factor_ != 1.0f)
                for (int c = 0; c < width; c++) values[c] *= factor_;
            int c = 0;
            for (; c + LANES <= width; c += LANES) store(to + c, load<vf>(to + c) + load<vf>(values + c));
            for (; c < width; c++) to[c] += values[c];
        }
    }

    float* const residual_;
    const int width_, stride_;
    const float factor_;
};

// out = in x matrix, float32 [rows][stride], of which `width` numbers are written
class Linear final : public Gemm {
   public:
    Linear(float* out, const Product* products, int num_products, int width, int stride,
           const Routing* routing = nullptr)
        : Gemm(routing ? "experts_down" : "linear", products, num_products, routing ? 8 : 2, routing), out_(out),
          width_(width), stride_(stride) {}

   private:
    void finish(const Step&, const Part& part, const Scratch&) override {
        const int width = std::min(part.width, width_ - part.column);
        for (int r = 0; r < part.count; r++)
            memcpy(out_ + size_t(part.row + r) * stride_ + part.column, part.values + r * part.width, width * 4);
    }

    float* const out_;
    const int width_, stride_;
};

// Outputs of a feed-forward layer: plain activations, or float32 on every ISA.
struct InnerRows {
    Rows rows;
    bool floats;

    void prefetch(int row, int column, int width) const {
        const int size = floats ? sizeof(float) : sizeof(act);
        prefetch_to_write(rows.data + row * rows.stride + column * size, width * size);
    }

    void write(int row, int column, const float* values, int width) const {
        if (floats) {
            memcpy(reinterpret_cast<float*>(rows.data + row * rows.stride) + column, values, width * 4);
        } else {
            act* to = rows.plain(row) + column;
            int c = 0;
            for (; c + LANES <= width; c += LANES) store_acts(to + c, load<vf>(values + c));
            for (; c < width; c++) to[c] = to_act(values[c]);
        }
    }
};

// out = activation(in x up), of `inner` outputs
class Activate final : public Gemm {
   public:
    Activate(Rows out, bool floats, const Product* products, int num_products, Activation kind, int inner,
             const Routing* routing = nullptr, const XieluForm& xielu = {})
        : Gemm(routing ? "experts_up" : "activate", products, num_products, 4, routing), out_{out, floats}, kind_(kind),
          inner_(inner), xielu_(xielu) {}

   private:
    void prefetch_out(const Step&, const Part& part) const override {
        const int width = std::min(part.width, inner_ - part.column);
        for (int r = 0; r < part.count; r++) out_.prefetch(part.row + r, part.column, width);
    }

    void finish(const Step&, const Part& part, const Scratch&) override {
        switch (kind_) {
            case Activation::SILU: return finish_as<Activation::SILU>(part);
            case Activation::GELU: return finish_as<Activation::GELU>(part);
            case Activation::GELU_TANH: return finish_as<Activation::GELU_TANH>(part);
            case Activation::GELU_QUICK: return finish_as<Activation::GELU_QUICK>(part);
            case Activation::RELU: return finish_as<Activation::RELU>(part);
            case Activation::RELU2: return finish_as<Activation::RELU2>(part);
            case Activation::XIELU: return finish_as<Activation::XIELU>(part);
            case Activation::SWIGLU_OAI: return;  // has a gate
        }
    }

    template <Activation KIND>
    void finish_as(const Part& part) const {
        const int width = std::min(part.width, inner_ - part.column);
        for (int r = 0; r < part.count; r++) {
            float* values = part.values + r * part.width;
            for (int c = 0; c < part.width; c += LANES) {
                if constexpr (KIND == Activation::XIELU)
                    store(values + c, xielu(load<vf>(values + c), xielu_));
                else
                    store(values + c, activate<KIND>(load<vf>(values + c)));
            }
            out_.write(part.row + r, part.column, values, width);
        }
    }

    const InnerRows out_;
    const Activation kind_;
    const int inner_;
    const XieluForm xielu_;
};

// out = activation(in x gate) * (in x up), by default SiLU. A panel holds eight outputs of gate and the eight of up beside
// them.
class Swiglu final : public Gemm {
   public:
    // `out` is plain activations; with `floats`, float32 on every ISA. One matrix has eight of gate and the eight of up
    // that belong to them in each panel; two are gate and up, in the order of the checkpoint.
    Swiglu(Rows out, bool floats, const Product* products, int num_products, Activation kind = Activation::SILU,
           const SwigluForm& form = {}, const Routing* routing = nullptr)
        : Gemm(routing ? "experts_gate_up" : kind == Activation::SILU ? "swiglu" : "glu", products, num_products, 4, routing),
          out_{out, floats}, kind_(kind), form_(form) {}

   private:
    int tiles_each() const override { return products_.size() == 1 ? Gemm::tiles_each() : num_pairs(); }

    // With two matrices a tile is half as many panels of each.
    int num_pairs() const { return ceil_div(num_panels(0), panels_ / 2); }

    Tile tile_at(int index) const override {
        if (products_.size() == 1) return Gemm::tile_at(index);
        Tile tile;
        if (index >= num_pairs()) return tile;
        const int first = index * (panels_ / 2);
        const int panels = std::min(panels_ / 2, num_panels(0) - first);
        tile.num_pieces = 2, tile.column = 2 * first * PANEL;
        for (int i = 0; i < 2; i++) tile.pieces[i] = {i, first, panels};
        return tile;
    }

    void prefetch_out(const Step&, const Part& part) const override {
        for (int r = 0; r < part.count; r++) out_.prefetch(part.row + r, part.column / 2, part.width / 2);
    }

    void finish(const Step&, const Part& part, const Scratch&) override {
        switch (kind_) {
            case Activation::SILU: return finish_as<Activation::SILU>(part);
            case Activation::GELU: return finish_as<Activation::GELU>(part);
            case Activation::GELU_TANH: return finish_as<Activation::GELU_TANH>(part);
            case Activation::GELU_QUICK: return finish_as<Activation::GELU_QUICK>(part);
            case Activation::RELU: return finish_as<Activation::RELU>(part);
            case Activation::RELU2: return finish_as<Activation::RELU2>(part);
            case Activation::SWIGLU_OAI: return finish_as<Activation::SWIGLU_OAI>(part);
            case Activation::XIELU: return;  // has no gate
        }
    }

    template <Activation KIND, class Vector>
    INLINE Vector multiplied(Vector gate, Vector up, const SwigluForm& form) {
        if constexpr (KIND == Activation::SILU) return silu_mul(gate, up);
        if constexpr (KIND == Activation::SWIGLU_OAI) return clamped_swiglu(gate, up, form);
        return activate<KIND>(gate) * up;
    }

    template <Activation KIND>
    void finish_as(const Part& part) const {
        const int width = part.width, column = part.column / 2;
        const bool apart = products_.size() > 1;
        for (int r = 0; r < part.count; r++) {
            const float* values = part.values + r * width;
            float gated[4 * PANEL / 2];
            int c = 0;
#if defined(ISA_AVX512)
            for (; !apart && c + 2 * PANEL <= width; c += 2 * PANEL) {  // two panels fill a vector
                const vf first = load<vf>(values + c), second = load<vf>(values + c + PANEL);
                store(gated + c / 2, multiplied<KIND>(low_halves(first, second), high_halves(first, second), form_));
            }
#endif
            for (; c < width; c += PANEL) {
                const float* gates = values + (apart ? c / 2 : c);
                const float* ups = gates + (apart ? width / 2 : 8);
                for (int i = 0; i < PANEL / 2; i += HALF_PANEL) {
                    const half_panel gate = load<half_panel>(gates + i), up = load<half_panel>(ups + i);
                    store(gated + c / 2 + i, multiplied<KIND>(gate, up, form_));
                }
            }
            out_.write(part.row + r, column, gated, width / 2);
        }
    }

    const InnerRows out_;
    const Activation kind_;
    const SwigluForm form_;
};

// The largest logit of a row that a thread has computed.
struct Best {
    float value;
    int32_t id;
};
constexpr Best NO_BEST = {-INFINITY, -1};

// A factor of logits, and the cap c of c * tanh(logit / c); 0 for none.
struct LogitForm {
    float scale = 1.0f, softcap = 0.0f;
};

// Logits of the sampled tokens. Of a row that is greedy and nothing else only the largest is kept; others are written.
// `greedy` may be null, where none is.
class Head final : public Gemm {
   public:
    // The matrix has the `vocab_size` outputs from id `first` on; rows of logits are `stride` numbers apart.
    Head(float* logits, Best* best, int max_samples, Rows in, const Matrix& matrix, int vocab_size, int first,
         int stride, const uint8_t* greedy, const LogitForm& form = {})
        : Gemm("head", in, matrix, 4), logits_(logits), best_(best), max_samples_(max_samples),
          vocab_size_(vocab_size), first_(first), stride_(stride), greedy_(greedy), form_(form) {}

   private:
    int rows(const Step& step) const override { return step.samples; }

    void finish(const Step&, const Part& part, const Scratch& scratch) override {
        if (form_.scale != 1.0f || form_.softcap > 0.0f)
            for (int i = 0; i < part.count * part.width; i += LANES) {
                vf values = load<vf>(part.values + i) * form_.scale;
                if (form_.softcap > 0.0f) values = form_.softcap * tanh_of(values * (1.0f / form_.softcap));
                store(part.values + i, values);
            }
        for (int r = 0; r < part.count; r++)
            finish_row(part.row + r, part.column, part.width, part.values + r * part.width, scratch);
    }

    void finish_row(int row, int column, int width, const float* values, const Scratch& scratch) const {
        const int count = column + width <= vocab_size_ ? width : vocab_size_ - column;
        if (!greedy_ || !greedy_[row]) {
            memcpy(logits_ + size_t(row) * stride_ + first_ + column, values, count * 4);
            return;
        }
        Best& best = best_[size_t(scratch.thread) * max_samples_ + row];
        int c = 0;
        vf tops = splat(-INFINITY);
        for (; c + LANES <= count; c += LANES) tops = max(load<vf>(values + c), tops);  // in this order NaN loses
        float top = largest(tops);
        for (; c < count; c++) top = values[c] > top ? values[c] : top;
        if (!(top > best.value || (top == best.value && first_ + column < best.id))) return;
        for (c = 0; c < count - 1 && values[c] != top; c++) {}
        best = {top, first_ + column + c};
    }

    float* const logits_;
    Best* const best_;
    const int max_samples_, vocab_size_, first_, stride_;
    const uint8_t* const greedy_;
    const LogitForm form_;
};

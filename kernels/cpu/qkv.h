// The matmul that makes queries, keys and values, with rotary embedding and writing the KV cache.
#pragma once

#include "linear.h"

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
    // `queries` are plain activations. The products are one of all heads, or one of each kind.
    Qkv(Rows queries, const Product* products, int num_products, int num_heads, const KV& kv, const float* cos,
        const float* sin, const HeadNorms& norms)
        : Gemm("qkv", products, num_products, kv.head_dim / PANEL), queries_(queries), num_heads_(num_heads), kv_(kv),
          cos_(cos), sin_(sin), norms_(norms), scale_(1.0f / std::sqrt(float(kv.head_dim))) {}

   private:
    static constexpr int QUERY = 0, KEY = 1, VALUE = 2;

    int kind(int head) const { return head < num_heads_ ? QUERY : head < num_heads_ + kv_.heads ? KEY : VALUE; }

    act* query(int row, int head) const { return queries_.plain(row) + head * kv_.head_dim; }

    uint16_t* key(int64_t slot, int head) const { return kv_.keys(slot / BLOCK, head) + slot % BLOCK * 2; }
    uint16_t* value(int64_t slot, int head) const {
        return kv_.values(slot / BLOCK, head) + slot % BLOCK / 2 * PANEL * 2 + slot % 2;
    }

    void prefetch_out(const Step& step, const Part& part) const override {
        const int head = part.column / kv_.head_dim;
        if (kind(head) == QUERY) {
            for (int r = 0; r < part.count; r++)
                prefetch_to_write(query(part.row + r, head), kv_.head_dim * sizeof(act));
            return;
        }
        for (int r = 0; r < part.count; r++) {
            const int64_t slot = step.slots[part.row + r];
            if (r && slot / BLOCK == step.slots[part.row + r - 1] / BLOCK) continue;
            prefetch_to_write(kind(head) == KEY ? kv_.keys(slot / BLOCK, head - num_heads_)
                                                : kv_.values(slot / BLOCK, head - num_heads_ - kv_.heads),
                              int(kv_.head_size() * 2));
        }
    }

    void finish(const Step& step, const Part& part, const Scratch&) override {
        const int head = part.column / kv_.head_dim;
        for (int r = 0; r < part.count; r++) finish_row(step, part.row + r, head, part.values + r * part.width);
    }

    void finish_row(const Step& step, int row, int head, float* values) const {
        const int dim = kv_.head_dim;
        if (kind(head) == VALUE) {
            uint16_t* to = value(step.slots[row], head - num_heads_ - kv_.heads);
            for (int d = 0; d < dim; d += LANES) {
                const halves numbers = to_bf16(load<vf>(values + d));
                for (int i = 0; i < LANES; i++) to[d / PANEL * PANEL * BLOCK + (d % PANEL + i) * 2] = numbers[i];
            }
            return;
        }
        if (const float* weight = kind(head) == QUERY ? norms_.query : norms_.key) {
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
        if (kind(head) == QUERY) {
            act* to = query(row, head);
            for (int c = 0; c < dim; c += LANES) store_acts(to + c, load<vf>(values + c) * scale_);
        } else {
            uint16_t* to = key(step.slots[row], head - num_heads_);
            for (int c = 0; c < dim; c += LANES) {
                uint32_t pairs[LANES / 2];
                store(pairs, to_bf16(load<vf>(values + c)));
                for (int i = 0; i < LANES / 2; i++) memcpy(to + (c + 2 * i) * BLOCK, pairs + i, 4);
            }
        }
    }

    const Rows queries_;
    const int num_heads_;
    const KV kv_;
    const float *const cos_, *const sin_;
    const HeadNorms norms_;
    const float scale_;
};

// The matmul that makes queries, keys and values, with rotary embedding and writing the KV cache.
#pragma once

#include "kv.h"
#include "linear.h"

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
            const int at = head - num_heads_;
            prefetch_to_write(kind(head) == KEY ? kv_.keys(slot / BLOCK, at) : kv_.values(slot / BLOCK, at - kv_.heads),
                              int(kv_.panel_bytes()));
            if (kv_.type == KVType::INT8)
                prefetch_to_write(kv_.key_scales(slot / BLOCK, kind(head) == KEY ? at : at - kv_.heads), LINE);
        }
    }

    void finish(const Step& step, const Part& part, const Scratch&) override {
        const int head = part.column / kv_.head_dim;
        for (int r = 0; r < part.count; r++) finish_row(step, part.row + r, head, part.values + r * part.width);
    }

    void finish_row(const Step& step, int row, int head, float* values) const {
        const int dim = kv_.head_dim;
        if (kind(head) == VALUE) {
            write_values(step.slots[row], head - num_heads_ - kv_.heads, values);
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
            write_keys(step.slots[row], head - num_heads_, values);
        }
    }

    void write_keys(int64_t slot, int head, const float* values) const {
        const int token = int(slot % BLOCK);
        uint8_t* to = kv_.keys(slot / BLOCK, head);
        if (kv_.type == KVType::INT8) {
            int8_t codes[MAX_HEAD_DIM];
            kv_.key_scales(slot / BLOCK, head)[token] = quantize_head(values, kv_.head_dim, codes);
            for (int d = 0; d < kv_.head_dim; d += 2) memcpy(to + key_place(d, token), codes + d, 2);
            return;
        }
        for (int d = 0; d < kv_.head_dim; d += LANES) {
            uint32_t pairs[LANES / 2];
            store(pairs, to_bf16(load<vf>(values + d)));
            for (int i = 0; i < LANES / 2; i++) memcpy(to + 2 * key_place(d + 2 * i, token), pairs + i, 4);
        }
    }

    void write_values(int64_t slot, int head, const float* values) const {
        const int token = int(slot % BLOCK);
        uint8_t* to = kv_.values(slot / BLOCK, head);
        if (kv_.type == KVType::INT8) {
            int8_t codes[MAX_HEAD_DIM];
            kv_.value_scales(slot / BLOCK, head)[token] = quantize_head(values, kv_.head_dim, codes);
            for (int d = 0; d < kv_.head_dim; d++) to[value_place(d, token)] = uint8_t(codes[d]);
            return;
        }
        for (int d = 0; d < kv_.head_dim; d += LANES) {
            const halves numbers = to_bf16(load<vf>(values + d));
            uint16_t* at = reinterpret_cast<uint16_t*>(to) + value_place(d, token);
            for (int i = 0; i < LANES; i++) at[2 * i] = numbers[i];
        }
    }

    const Rows queries_;
    const int num_heads_;
    const KV kv_;
    const float *const cos_, *const sin_;
    const HeadNorms norms_;
    const float scale_;
};

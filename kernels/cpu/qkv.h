// The matmul that makes queries, keys and values, with rotary embedding and writing the KV cache.
#pragma once

#include "hadamard.h"
#include "kv.h"
#include "linear.h"

// Norms of queries and keys before rotary embedding, or nulls. Weights are in the order of the head's numbers below.
struct HeadNorms {
    const float *query = nullptr, *key = nullptr;
    float eps = 0;
    int layer = 0;  // layer norms, not RMS norms
    int each = 0;   // weights [heads][head_dim], not [head_dim]
    int all = 0;    // one norm of all heads of queries, and one of all of keys
    int values = 0;  // RMS norms of values, without weights
};

// How queries are scaled: by `scale`, and by growth[position] where that is given.
struct QueryOptions {
    float scale;
    const float* growth;
};

// What happens to the outputs of a layer's matmul: queries and keys go through their norms where a model has such, and
// are turned by their positions (Su et al., 2021, arXiv:2104.09864). Queries are scaled and left for attention, keys and
// values written to the cache.
//
// The numbers of a head of queries or keys come in another order, the same for both, so that their products stay what
// they were: in a panel, eight of the first half and the eight of the second half that they turn with. In 8 bits,
// queries and keys are scaled by factors that even out the errors of rounding, and all three go through a Hadamard
// transform.
struct QkvWriter {
    static constexpr int QUERY = 0, KEY = 1, VALUE = 2;

    const Rows queries_;
    const int num_heads_;
    const KV kv_;
    const float *const cos_, *const sin_;
    const HeadNorms norms_;
    const QueryOptions form_;

    QkvWriter(Rows queries, int num_heads, const KV& kv, const float* cos, const float* sin, const HeadNorms& norms,
              const QueryOptions* form)
        : queries_(queries), num_heads_(num_heads), kv_(kv), cos_(cos), sin_(sin), norms_(norms),
          form_(form ? *form : QueryOptions{1.0f / std::sqrt(float(kv.head_dim)), nullptr}) {}

    int kind(int head) const { return head < num_heads_ ? QUERY : head < num_heads_ + kv_.heads ? KEY : VALUE; }

    act* query(int row, int head) const { return queries_.plain(row) + head * kv_.head_dim; }

    // 1 / the root of the mean square of a head's numbers.
    float rms_factor(const float* values) const {
        vf squares{};
        for (int c = 0; c < kv_.head_dim; c += LANES) {
            const vf value = load<vf>(values + c);
            squares = fma(value, value, squares);
        }
        return 1.0f / std::sqrt(sum(squares) / float(kv_.head_dim) + norms_.eps);
    }

    void normalize(int head, float* values, float known) const {
        const int dim = kv_.head_dim, number = kind(head) == QUERY ? head : head - num_heads_;
        const float* weight = kind(head) == QUERY ? norms_.query : norms_.key;
        if (!weight) return;
        if (norms_.each || norms_.all) weight += number * dim;
        if (norms_.layer) {
            vf sums{};
            for (int c = 0; c < dim; c += LANES) sums += load<vf>(values + c);
            const float mean = sum(sums) / float(dim);
            for (int c = 0; c < dim; c++) values[c] -= mean;
        }
        const float factor = norms_.all ? known : rms_factor(values);
        for (int c = 0; c < dim; c++) values[c] = values[c] * factor * weight[c];
    }

    // `factor` is that of a norm of all heads.
    void write(const Step& step, int row, int head, float* values, float factor = 1.0f) const {
        const int dim = kv_.head_dim;
        if (kind(head) == VALUE) {
            if (norms_.values) {
                const float factor = rms_factor(values);
                for (int c = 0; c < dim; c++) values[c] *= factor;
            }
            if (kv_.type == KVType::INT8) hadamard(values, dim);
            write_values(step.slots[row], head - num_heads_ - kv_.heads, values);
            return;
        }
        normalize(head, values, factor);
        const float* cos = cos_ + step.positions[row] * (dim / 2);
        const float* sin = sin_ + step.positions[row] * (dim / 2);
        for (int c = 0; c < dim; c += PANEL) {
            const f8 a = load<f8>(values + c), b = load<f8>(values + c + 8);
            const f8 cosine = load<f8>(cos + c / 2), sine = load<f8>(sin + c / 2);
            store(values + c, a * cosine - b * sine);
            store(values + c + 8, b * cosine + a * sine);
        }
        if (kv_.center && kind(head) == KEY) {
            const float* center = kv_.center + (head - num_heads_) * dim;
            for (int c = 0; c < dim; c += LANES) store(values + c, load<vf>(values + c) - load<vf>(center + c));
        }
        if (kv_.type == KVType::INT8) transform(step.positions[row], head, values);
        if (kind(head) == QUERY) {
            act* to = query(row, head);
            const float scale = form_.growth ? form_.scale * form_.growth[step.positions[row]] : form_.scale;
            for (int c = 0; c < dim; c += LANES) store_acts(to + c, load<vf>(values + c) * scale);
        } else {
            write_keys(step.slots[row], head - num_heads_, values);
        }
    }

    // Queries and keys before keys are rounded to 8 bits. Their products stay what they were.
    void transform(int position, int head, float* values) const {
        const int dim = kv_.head_dim, of_keys = kind(head) == KEY ? head - num_heads_ : head / (num_heads_ / kv_.heads);
        if (kv_.factors) {
            float* squares = kind(head) == QUERY ? kv_.factors->query_squares : nullptr;
            for (int c = 0; squares && position >= BLOCK && c < dim; c++) squares[head * dim + c] += values[c] * values[c];
            const float* factors = (kind(head) == KEY ? kv_.factors->factors : kv_.factors->inverses) + of_keys * dim;
            for (int c = 0; c < dim; c += LANES) store(values + c, load<vf>(values + c) * load<vf>(factors + c));
        }
        hadamard(values, dim);
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
};

// Queries, keys and values. A tile is one head.
class Qkv final : public Gemm {
   public:
    // `queries` are plain activations. The products are one of all heads, or one of each kind.
    Qkv(const QkvWriter& writer, const Product* products, int num_products)
        : Gemm("qkv", products, num_products, writer.kv_.head_dim / PANEL), writer_(writer) {}

   private:
    void prefetch_out(const Step& step, const Part& part) const override {
        const KV& kv = writer_.kv_;
        const int head = part.column / kv.head_dim, kind = writer_.kind(head), num_heads = writer_.num_heads_;
        if (kind == QkvWriter::QUERY) {
            for (int r = 0; r < part.count; r++)
                prefetch_to_write(writer_.query(part.row + r, head), kv.head_dim * sizeof(act));
            return;
        }
        for (int r = 0; r < part.count; r++) {
            const int64_t slot = step.slots[part.row + r];
            if (r && slot / BLOCK == step.slots[part.row + r - 1] / BLOCK) continue;
            const int at = head - num_heads, of_values = at - kv.heads;
            const bool is_key = kind == QkvWriter::KEY;
            prefetch_to_write(is_key ? kv.keys(slot / BLOCK, at) : kv.values(slot / BLOCK, of_values),
                              int(kv.panel_bytes()));
            if (kv.type == KVType::INT8) prefetch_to_write(kv.key_scales(slot / BLOCK, is_key ? at : of_values), LINE);
        }
    }

    void finish(const Step& step, const Part& part, const Scratch&) override {
        const int head = part.column / writer_.kv_.head_dim;
        for (int r = 0; r < part.count; r++) writer_.write(step, part.row + r, head, part.values + r * part.width);
    }

    const QkvWriter writer_;
};

// Which heads of all ranks a rank has.
struct HeadShare {
    int queries, keys;               // all heads of queries; of keys, and of values
    int first_query = 0, first_key = 0;  // the rank's first ones
};

// The same from the results of a matmul, float32 [tokens][all heads x head_dim], for norms of all heads together. A tile
// is one token. Each rank writes its own heads.
class QkvRows final : public Op {
   public:
    QkvRows(const QkvWriter& writer, float* values, const HeadShare& share)
        : Op("qkv_rows"), writer_(writer), values_(values), share_(share) {}

    int tiles(const Step& step) const override { return step.tokens; }

    void tile(const Step& step, int row, const Scratch&) override {
        const int dim = writer_.kv_.head_dim, queries = share_.queries, keys = share_.keys;
        float* values = values_ + size_t(row) * (queries + 2 * keys) * dim;
        const float factors[3] = {factor(values, queries * dim), factor(values + queries * dim, keys * dim), 1.0f};
        const int own_queries = writer_.num_heads_, own_keys = writer_.kv_.heads;
        for (int head = 0; head < own_queries + 2 * own_keys; head++) {
            const int kind = writer_.kind(head);
            const int at = kind == QkvWriter::QUERY ? share_.first_query + head
                           : kind == QkvWriter::KEY ? queries + share_.first_key + head - own_queries
                                                    : queries + keys + share_.first_key + head - own_queries - own_keys;
            // The others' factors are of the numbers as they are.
            float own[MAX_HEAD_DIM];
            memcpy(own, values + at * dim, dim * 4);
            writer_.write(step, row, head, own, factors[kind]);
        }
    }

    Cost cost(const Step& step) const override {
        return {double(step.tokens) * (writer_.num_heads_ + 2 * writer_.kv_.heads) * writer_.kv_.head_dim * 6, 0};
    }

   private:
    float factor(const float* values, int width) const {
        vf squares{};
        for (int c = 0; c < width; c += LANES) squares = fma(load<vf>(values + c), load<vf>(values + c), squares);
        return 1.0f / std::sqrt(sum(squares) / float(width) + writer_.norms_.eps);
    }

    const QkvWriter writer_;
    float* const values_;
    const HeadShare share_;
};

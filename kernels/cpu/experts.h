// A mixture of experts: each token is computed by the few experts that a router chooses (Shazeer et al., 2017,
// arXiv:1701.06538).
//
//     router logits ─ Route ─► rows in expert order ─ Gather, gate and up, down ─► Combine ─► residual
//
// The matrices of all experts are one, the panels of an expert behind those of the one before. A row has the same bits
// with any other rows beside it, and the results of a token are summed in the order of its choices. So a token has the
// same bits in any step.
#pragma once

#include <algorithm>
#include <cstring>

#include "linear.h"

enum class Scoring : int { SOFTMAX = 0, SIGMOID = 1 };

// How logits become weights. `selection_bias` [experts] is added to the scores that choose, but not to weights; or null.
struct RouteOptions {
    Scoring scoring;
    int normalized;
    float scale;
    const float* selection_bias;
    int groups;  // of adjacent experts; with more than one, a token's experts are in the best `groups_per_token`
    int groups_per_token;
    int best_of_group;  // a group is as good as its best expert (1), or as the sum of its two best (2)
    const float* factors;  // [experts], of weights, or null
    float softcap;         // c in c tanh(logit / c), or 0
};

// Rows of tokens, copied to their places in expert order.
struct GatheredRows {
    Rows from, to;
    size_t bytes;  // of a row

    void copy(const Routing& routing, int begin, int end) const {
        for (int row = begin; row < end; row++)
            memcpy(to.data + row * to.stride, from.data + routing.tokens[row] * from.stride, bytes);
    }
};

constexpr int ROWS_GATHERED_AT_ONCE = 64;  // for fewer, another op would cost more than it saves

// Chooses the experts of each token, and sorts the tokens by expert.
class Route final : public Op {
   public:
    // `logits` are [tokens][stride]. The largest score is the first choice; among equal ones, the first expert.
    Route(const float* logits, int stride, const RouteOptions& form, int experts, int per_token, int max_tokens,
          const GatheredRows* gathered, int num_gathered)
        : Op("route"), routing(experts, per_token, max_tokens), logits_(logits), stride_(stride), form_(form),
          gathered_(gathered, gathered + num_gathered), chosen_(size_t(max_tokens) * per_token), next_(experts) {}

    int tiles(const Step& step) const override { return step.tokens ? 1 : 0; }

    size_t scratch_bytes() const override { return size_t(4) * padded() * 4; }

    void tile(const Step& step, int, const Scratch& scratch) override {
        float* scores = reinterpret_cast<float*>(scratch.memory);
        for (int token = 0; token < step.tokens; token++) choose(token, scores);
        sort(step.tokens);
        const int rows = step.tokens * routing.per_token;
        if (rows <= ROWS_GATHERED_AT_ONCE)
            for (const GatheredRows& gathered : gathered_) gathered.copy(routing, 0, rows);
    }

    Cost cost(const Step& step) const override { return {double(step.tokens) * stride_ * 4, 0}; }

    Routing routing;

   private:
    int padded() const { return ceil_div(routing.experts, LANES) * LANES; }

    void choose(int token, float* scores) {
        const int experts = routing.experts, count = routing.per_token, width = padded();
        float *ranks = scores + width, *best = ranks + width, *groups = best + width;
        const float* logits = logits_ + size_t(token) * stride_;
        memcpy(scores, logits, experts * 4);
        if (form_.softcap)
            for (int i = 0; i < experts; i++) scores[i] = form_.softcap * tanh_of(vf{} + scores[i] / form_.softcap)[0];
        std::fill(scores + experts, scores + width, -INFINITY);
        if (form_.scoring == Scoring::SOFTMAX) {
            vf tops = load<vf>(scores);
            for (int i = LANES; i < width; i += LANES) tops = max(tops, load<vf>(scores + i));
            const float top = largest(tops);
            vf sums{};
            for (int i = 0; i < width; i += LANES) {
                const vf score = exp_of(load<vf>(scores + i) - top);
                sums += score;
                store(scores + i, score);
            }
            const float total = sum(sums);
            for (int i = 0; i < width; i += LANES) store(scores + i, load<vf>(scores + i) / total);
        } else {
            for (int i = 0; i < width; i += LANES) store(scores + i, sigmoid(load<vf>(scores + i)));
        }
        // Logits rank as softmax scores do, and those of unlikely experts differ where scores are all zero.
        const bool has_groups = form_.groups > 1, is_single = !has_groups || form_.best_of_group == 1;
        const bool by_logits = form_.scoring == Scoring::SOFTMAX && !form_.selection_bias && is_single && !form_.softcap;
        memcpy(ranks, by_logits ? logits : scores, experts * 4);
        if (form_.selection_bias)
            for (int i = 0; i < experts; i++) ranks[i] += form_.selection_bias[i];
        if (has_groups) keep_best_groups(ranks, groups);
        int32_t* chosen = chosen_.data() + size_t(token) * count;
        int num = 0;
        for (int i = 0; i < experts; i++) {
            if (num == count && !(ranks[i] > best[num - 1])) continue;
            int at = num < count ? num++ : count - 1;
            for (; at > 0 && ranks[i] > best[at - 1]; at--) best[at] = best[at - 1], chosen[at] = chosen[at - 1];
            best[at] = ranks[i], chosen[at] = i;
        }
        float* weights = routing.weights.data() + size_t(token) * count;
        float total = 0;
        for (int i = 0; i < count; i++) total += scores[chosen[i]];
        if (!form_.normalized) total = 1;
        for (int i = 0; i < count; i++) weights[i] = scores[chosen[i]] / total * form_.scale;
        if (form_.factors)
            for (int i = 0; i < count; i++) weights[i] *= form_.factors[chosen[i]];
    }

    // Experts of other groups get the lowest rank. Among equal groups, the first is better.
    void keep_best_groups(float* ranks, float* sums) const {
        const int num = form_.groups, size = routing.experts / num;
        for (int group = 0; group < num; group++) {
            const float* of_group = ranks + group * size;
            float first = -INFINITY, second = -INFINITY;
            for (int i = 0; i < size; i++) {
                if (of_group[i] > first)
                    second = first, first = of_group[i];
                else if (of_group[i] > second)
                    second = of_group[i];
            }
            sums[group] = form_.best_of_group > 1 ? first + second : first;
        }
        for (int group = 0; group < num; group++) {
            int better = 0;
            for (int i = 0; i < num; i++)
                better += sums[i] > sums[group] || (sums[i] == sums[group] && i < group);
            if (better >= form_.groups_per_token)
                std::fill(ranks + group * size, ranks + (group + 1) * size, -INFINITY);
        }
    }

    // By counting.
    void sort(int tokens) {
        const int count = routing.per_token, rows = tokens * count;
        std::fill(next_.begin(), next_.end(), 0);
        for (int i = 0; i < rows; i++) next_[chosen_[i]]++;
        int active = 0, begin = 0;
        for (int expert = 0; expert < routing.experts; expert++) {
            const int size = next_[expert];
            next_[expert] = begin;
            if (!size) continue;
            routing.active[active] = expert, routing.begin[active++] = begin;
            begin += size;
        }
        routing.begin[active] = begin;
        for (int i = 0; i < rows; i++) {
            const int row = next_[chosen_[i]]++;
            routing.tokens[row] = i / count;
            routing.places[i] = row;
        }
        routing.num_active.store(active, std::memory_order_relaxed);
    }

    const float* const logits_;
    const int stride_;
    const RouteOptions form_;
    const std::vector<GatheredRows> gathered_;
    std::vector<int32_t> chosen_;  // [tokens][per_token]
    std::vector<int32_t> next_;    // [experts]
};

// Copies activations to expert order, where they are too many for `Route`.
class Gather final : public Op {
   public:
    Gather(const Routing& routing, const GatheredRows& gathered)
        : Op("gather"), routing_(routing), gathered_(gathered) {}

    int tiles(const Step& step) const override {
        const int rows = step.tokens * routing_.per_token;
        return rows > ROWS_GATHERED_AT_ONCE ? ceil_div(rows, ROWS) : 0;
    }

    void tile(const Step& step, int index, const Scratch&) override {
        gathered_.copy(routing_, index * ROWS, std::min((index + 1) * ROWS, step.tokens * routing_.per_token));
    }

    Cost cost(const Step& step) const override {
        return {tiles(step) ? 2.0 * step.tokens * routing_.per_token * gathered_.bytes : 0, 0};
    }

   private:
    static constexpr int ROWS = 16;
    const Routing& routing_;
    const GatheredRows gathered_;
};

// What is added to the experts' results: those of the expert that computes every token, [tokens][width], times the
// sigmoid of logits[token * stride] unless `logits` is null. All null: there is none.
struct SharedExpert {
    const float* out;
    const float* logits;
    int stride;
};

// to = (weighted sum of each token's experts + shared expert) * factor, or to += it.
class Combine final : public Op {
   public:
    // Rows of `to` are `stride` numbers apart.
    Combine(float* to, bool adds, const float* parts, const Routing& routing, int width, int stride,
            const SharedExpert& shared, float factor)
        : Op("combine"), to_(to), adds_(adds), parts_(parts), routing_(routing), width_(width), stride_(stride),
          shared_(shared), factor_(factor) {}

    int tiles(const Step& step) const override { return step.tokens * num_pieces(); }

    void tile(const Step&, int index, const Scratch&) override {
        const int token = index / num_pieces(), first = index % num_pieces() * PIECE;
        const int end = std::min(first + PIECE, width_), count = routing_.per_token;
        const int32_t* places = routing_.places.data() + size_t(token) * count;
        const float* weights = routing_.weights.data() + size_t(token) * count;
        float* to = to_ + size_t(token) * stride_;
        const float* shared = shared_.out ? shared_.out + size_t(token) * width_ : nullptr;
        const float gate =
            shared_.logits ? sigmoid(splat(shared_.logits[size_t(token) * shared_.stride]))[0] : 1.0f;
        const auto total_at = [&]<class Vector>(int c) {
            Vector total = load<Vector>(parts_ + size_t(places[0]) * width_ + c) * weights[0];
            for (int i = 1; i < count; i++)
                total = total + load<Vector>(parts_ + size_t(places[i]) * width_ + c) * weights[i];
            if (shared) total = total + load<Vector>(shared + c) * gate;
            if (factor_ != 1.0f) total = total * factor_;
            store(to + c, adds_ ? load<Vector>(to + c) + total : total);
        };
        int c = first;
        for (; c + LANES <= end; c += LANES) total_at.template operator()<vf>(c);
        for (; c < end; c++) total_at.template operator()<float>(c);
    }

    Cost cost(const Step& step) const override {
        return {double(step.tokens) * width_ * 4 * (routing_.per_token + 2 + (shared_.out ? 1 : 0)), 0};
    }

   private:
    static constexpr int PIECE = 512;
    int num_pieces() const { return ceil_div(width_, PIECE); }

    float* const to_;
    const bool adds_;
    const float* const parts_;
    const Routing& routing_;
    const int width_, stride_;
    const SharedExpert shared_;
    const float factor_;
};

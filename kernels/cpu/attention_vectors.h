// The matmuls of attention by vectors: up to ATTENTION_ROWS rows of queries times keys, or of weights times values.
#pragma once

#include "attention_part.h"

#if !defined(AMX)

// Over keys and values in bfloat16.
struct Bf16Panels {
    typedef act Number;

    // Whether half a block of keys can be multiplied.
    static constexpr bool HALVES = VECTORS > 1;

    // Panels per call. One row has registers for more, and needs them to hide the latency of its sums.
    template <int R>
    static constexpr int AT_ONCE = R == 1 ? 4 : R == 2 || LANES == 16 ? 2 : 1;

    // scores [R][P * 16], STRETCH apart, = queries x P blocks of keys, each of which is one panel; only
    // the first V vectors of each. Not inlined: with constant arguments GCC runs out of registers.
    template <int R, int P, int V = VECTORS>
    __attribute__((noinline)) static void multiply_keys(const AttentionPart<act>& part, const Stretch& stretch, int block,
                                                        StretchAhead<false>& at_next, int dim) {
        const Stretch& after = at_next.next;
        const uint8_t* const* ahead = block + P <= after.num_blocks ? after.keys + block : nullptr;
        vf acc[R][P][V];
        IN_REGISTERS
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++)
                for (int v = 0; v < V; v++) acc[r][p][v] = vf{};
        const uint8_t* const* keys = stretch.keys + block;
        for (int d = 0; d < dim; d += PANEL) {
            const act* rows[R];
            const uint32_t* from[P];
            const act* at = part.queries + d / SLICE * ITEM_STATES * SLICE + d % SLICE;
            for (int r = 0; r < R; r++) rows[r] = at + r * SLICE;
            for (int p = 0; p < P; p++) from[p] = reinterpret_cast<const uint32_t*>(keys[p]) + d / 2 * PANEL;
            const uint8_t* next[P];
            if (ahead)
                for (int p = 0; p < P; p++) next[p] = ahead[p] + d * PANEL * 2;
            multiply_bf16<R, P>(rows, from, PANEL / 2, acc, ahead ? next : nullptr);
        }
        float* out = part.scores + block * BLOCK;
        IN_REGISTERS
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++)
                for (int v = 0; v < V; v++) store(out + r * STRETCH + p * PANEL + v * LANES, acc[r][p][v]);
    }

    // out [R][P * 16], from the dimension `panel` * 16 on, += weights [R][64] x values.
    template <int R, int P>
    __attribute__((noinline)) static void multiply_values(const AttentionPart<act>& part, const Stretch& stretch,
                                                          StretchAhead<false>& at_next, int panel, int dim) {
        const Stretch& ahead = at_next.next;
        vf acc[R][P][VECTORS];
        float* out = part.out + panel * PANEL;
        const act* weights = part.weights;
        IN_REGISTERS
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++) acc[r][p][v] = part.so_far(r, out + r * dim + p * PANEL + v * LANES);
        for (int b = 0; b < part.num_blocks(); b++, weights += BLOCK) {
            constexpr int SIZE = PANEL * BLOCK * 2;
            const act* rows[R];
            const uint32_t* from[P];
            for (int r = 0; r < R; r++) rows[r] = weights + r * STRETCH;
            for (int p = 0; p < P; p++)
                from[p] = reinterpret_cast<const uint32_t*>(stretch.values[b] + (panel + p) * SIZE);
            const bool has_next = b < ahead.num_blocks;
            const uint8_t* next[P];
            for (int p = 0; has_next && p < P; p++) next[p] = ahead.values[b] + (panel + p) * SIZE;
            // Weights beyond are zero.
            const int pairs = std::min(BLOCK / 2, (part.keys - b * BLOCK + 1) / 2);
            multiply_bf16<R, P>(rows, from, pairs, acc, has_next ? next : nullptr);
        }
        IN_REGISTERS
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++) store(out + r * dim + p * PANEL + v * LANES, acc[r][p][v]);
    }
};

// Over keys and values in 8 bits: sums of integers, which are exact at every ISA. At most 256 dimensions or 64 keys times
// 127 x 32,767 fit into int32.
struct Int8Panels {
    typedef int16_t Number;

    static constexpr bool HALVES = false;

    template <int R>
    static constexpr int AT_ONCE = LANES == 16 ? (R <= 6 ? 4 : 2) : Bf16Panels::AT_ONCE<R>;

    // Lines to prefetch for four that are read.
    static constexpr int LINES_AHEAD = 3;

    // acc[r][p] += row r times panel p, over 16 numbers of depth.
    template <int R, int P>
    static inline __attribute__((always_inline)) void multiply(const int16_t* const (&rows)[R],
                                                               const uint8_t* const (&panels)[P],
                                                               word_sums (&acc)[R][P][VECTORS],
                                                               StretchAhead<true>& ahead) {
        ahead.prefetch_lines(P * LINES_AHEAD);
        for (int k = 0; k < 8; k++) {
            vi codes[P][VECTORS];
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++)
                    codes[p][v] =
                        sign_extend_bytes(reinterpret_cast<const int8_t*>(panels[p] + k * 2 * PANEL + v * 2 * LANES));
            for (int r = 0; r < R; r++) {
                const vi pair = load<int32_t>(rows[r] + 2 * k) - vi{};
                for (int p = 0; p < P; p++)
                    for (int v = 0; v < VECTORS; v++) acc[r][p][v] = dot_words(acc[r][p][v], codes[p][v], pair);
            }
        }
    }

    template <int R, int P>
    __attribute__((noinline)) static void multiply_keys(const AttentionPart<int16_t>& part, const Stretch& stretch,
                                                        int block, StretchAhead<true>& ahead, int dim) {
        word_sums acc[R][P][VECTORS] = {};
        for (int d = 0; d < dim; d += PANEL) {
            const int16_t* rows[R];
            const uint8_t* from[P];
            const int16_t* at = part.queries + d / SLICE * ITEM_STATES * SLICE + d % SLICE;
            for (int r = 0; r < R; r++) rows[r] = at + r * SLICE;
            for (int p = 0; p < P; p++) from[p] = stretch.keys[block + p] + d * PANEL;
            multiply<R, P>(rows, from, acc, ahead);
        }
        IN_REGISTERS
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) {
                const vf scales = load_scales(stretch.scales[block + p] + v * LANES);
                float* out = part.scores + (block + p) * BLOCK + v * LANES;
                for (int r = 0; r < R; r++)
                    store(out + r * STRETCH,
                          __builtin_convertvector(finish_words(acc[r][p][v]), vf) * scales * part.query_scales[r]);
            }
    }

    template <int R, int P>
    __attribute__((noinline)) static void multiply_values(const AttentionPart<int16_t>& part, const Stretch& stretch,
                                                          StretchAhead<true>& ahead, int panel, int dim) {
        word_sums acc[R][P][VECTORS] = {};
        const int16_t* weights = part.weights;
        for (int b = 0; b < part.num_blocks(); b++, weights += BLOCK) {
            constexpr int SIZE = PANEL * BLOCK;
            const int16_t* rows[R];
            const uint8_t* from[P];
            for (int r = 0; r < R; r++) rows[r] = weights + r * STRETCH;
            for (int p = 0; p < P; p++) from[p] = stretch.values[b] + (panel + p) * SIZE;
            multiply<R, P>(rows, from, acc, ahead);
        }
        float* out = part.out + panel * PANEL;
        IN_REGISTERS
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++) {
                    float* to = out + r * dim + p * PANEL + v * LANES;
                    const vf sums = __builtin_convertvector(finish_words(acc[r][p][v]), vf);
                    store(to, fma(sums, splat(part.weight_scales[r]), part.so_far(r, to)));
                }
    }
};

// The matmuls of some rows over a stretch.
template <class Panels>
class VectorProducts {
   public:
    typedef AttentionPart<typename Panels::Number> Part;
    typedef StretchAhead<std::is_same_v<Panels, Int8Panels>> Next;

    // scores [count][64] = queries [count][head_dim] x keys
    static void multiply_keys(const Part& part, int count, const Stretch& stretch, Next& ahead, int dim) {
        switch (count) {
#define CASE(R)                                                                           \
    case R:                                                                               \
        if constexpr (R <= ATTENTION_ROWS) all_keys<R>(part, stretch, ahead, dim);   \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
        }
    }

    // out [count][head_dim] += weights [count][64] x values
    static void multiply_values(const Part& part, int count, const Stretch& stretch, Next& ahead, int dim) {
        switch (count) {
#define CASE(R)                                                                           \
    case R:                                                                               \
        if constexpr (R <= ATTENTION_ROWS) all_values<R>(part, stretch, ahead, dim); \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
        }
    }

   private:
    template <int R>
    static constexpr int AT_ONCE = Panels::template AT_ONCE<R>;

    template <int R>
    static void all_keys(const Part& part, const Stretch& stretch, Next& ahead, int dim) {
        int b = 0;
        const int num_blocks = part.num_blocks();
        // Of the last block half may do.
        const bool has_half = Panels::HALVES && AT_ONCE<R> == 1 && num_blocks * BLOCK - part.keys >= BLOCK / 2;
        for (; b + AT_ONCE<R> <= num_blocks - has_half; b += AT_ONCE<R>)
            Panels::template multiply_keys<R, AT_ONCE<R>>(part, stretch, b, ahead, dim);
        if constexpr (AT_ONCE<R> > 1)
            for (; b < num_blocks; b++) Panels::template multiply_keys<R, 1>(part, stretch, b, ahead, dim);
        if constexpr (Panels::HALVES && AT_ONCE<R> == 1)
            if (has_half) Panels::template multiply_keys<R, 1, VECTORS / 2>(part, stretch, b, ahead, dim);
    }

    template <int R>
    static void all_values(const Part& part, const Stretch& stretch, Next& ahead, int dim) {
        const int num_panels = dim / PANEL;
        int p = 0;
        for (; p + AT_ONCE<R> <= num_panels; p += AT_ONCE<R>)
            Panels::template multiply_values<R, AT_ONCE<R>>(part, stretch, ahead, p, dim);
        if constexpr (AT_ONCE<R> > 1)
            for (; p < num_panels; p++) Panels::template multiply_values<R, 1>(part, stretch, ahead, p, dim);
    }
};

template <KVType TYPE>
using AttentionProducts = VectorProducts<std::conditional_t<TYPE == KVType::INT8, Int8Panels, Bf16Panels>>;

#endif

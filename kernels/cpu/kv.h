// The layout of a layer's keys and values, in bfloat16 or in 8 bits.
#pragma once

#include "matrix.h"
#include "step.h"

constexpr int MAX_HEAD_DIM = 512;

enum class KVType : int { BF16 = 0, INT8 = 1 };

// A block of a head is one panel of keys, 16 tokens wide and head_dim deep, and head_dim / 16 panels of values, 16
// tokens deep:
//
//     [blocks]{ [heads][head_dim / 2][16 tokens][2] keys | [heads][head_dim / 16][8][16][2] values | scales | others }
//
// Numbers are bfloat16, without scales, or int8: then each token has a scale for its keys and one for its values,
// bfloat16 [heads][2][16 tokens]. A bfloat16 scale has the range of float32, and every product with a code is exact.
// Keys are multiplied with factors before they are rounded to 8 bits, and queries with the inverses: [heads][head_dim].
struct KeyFactors {
    const float *factors, *inverses;
    float* query_squares;  // [heads of queries][head_dim], to which squares of queries are added; null but for calibration
};

struct KV {
    uint8_t* data;
    int heads, head_dim;
    KVType type;
    const float* center;        // [heads][head_dim], subtracted from keys before they are rounded, or null
    const KeyFactors* factors;  // for 8 bits, or null
    size_t stride;              // bytes from block to block: other layers may have a part of the place

    size_t panel_bytes() const { return size_t(head_dim) * BLOCK * (type == KVType::BF16 ? 2 : 1); }
    size_t scale_bytes() const { return type == KVType::BF16 ? 0 : 2 * BLOCK * sizeof(uint16_t); }
    size_t block_bytes() const { return heads * (2 * panel_bytes() + scale_bytes()); }

    uint8_t* keys(int64_t block, int head) const { return data + block * stride + head * panel_bytes(); }
    uint8_t* values(int64_t block, int head) const { return keys(block, heads + head); }
    uint16_t* key_scales(int64_t block, int head) const {
        return reinterpret_cast<uint16_t*>(keys(block, 2 * heads) + head * scale_bytes());
    }
    uint16_t* value_scales(int64_t block, int head) const { return key_scales(block, head) + BLOCK; }
};

// Places in a panel of keys and in those of values: of the pair of dimensions that d begins, and of dimension d.
INLINE int key_place(int d, int token) { return d * BLOCK + token * 2; }
INLINE int value_place(int d, int token) { return (d / PANEL * BLOCK + token / 2 * 2) * PANEL + d % PANEL * 2 + token % 2; }

// Quantizes a head's keys or values of one token: codes[d] = values[d] / scale, rounded to the nearest integer, ties to
// even. The scale is the largest magnitude / 127, rounded up to bfloat16, so that no code is beyond 127. Numbers that
// are nearly zero become zero. The scale is NaN if any number is not finite. The same operations at every ISA, so equal
// numbers have equal codes.
INLINE uint16_t quantize_head(const float* values, int dim, int8_t* codes) {
    vf tops{}, nothing{};
    for (int d = 0; d < dim; d += LANES) {
        const vf numbers = load<vf>(values + d);
        tops = max(tops, max(numbers, -numbers));
        nothing += numbers * 0.0f;
    }
    const uint32_t word = bits<uint32_t>(largest(tops) / 127.0f + sum(nothing));
    const uint16_t scale = uint16_t((word + 0xFFFF) >> 16);
    constexpr float least = 1.17549435e-38f, round = 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
    const float step = from_bf16(scale);
    if (step < least) {
        memset(codes, 0, dim);
        return 0;
    }
    const float inverse = 1.0f / step;
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    for (int d = 0; d < dim; d += LANES) {
        const vi numbers = bits<vi>(load<vf>(values + d) * inverse + round);
        store(codes + d, __builtin_convertvector(numbers, bytes));
    }
    return scale;
}

// LANES scales.
INLINE vf load_scales(const uint16_t* from) { return from_bf16(load<halves>(from)); }

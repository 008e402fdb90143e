// From the rows of a checkpoint to panels (matrix.h).
#pragma once

#include "matrix.h"

// Output n is the row at rows[n]: bfloat16, or blocks as ggml lays them out (q8_0: scale, 32 codes; q4_0: scale, 16
// bytes; q4_1: scale, minimum, 16 bytes; byte i has column i below and column 16 + i above). Null stands for zeros.
static void pack_panel(const Matrix& matrix, uint8_t* panels, const uint8_t* const* rows, int panel) {
    uint8_t* to = panels + panel * matrix.panel_bytes();
    memset(to, 0, matrix.panel_bytes());
    for (int lane = 0; lane < PANEL; lane++) {
        const uint8_t* from = rows[panel * PANEL + lane];
        if (!from) continue;
        if (matrix.format == Format::BF16) {
            for (int k = 0; k < matrix.depth / 2; k++) memcpy(to + (k * PANEL + lane) * 4, from + 4 * k, 4);
            continue;
        }
        const bool bytes = matrix.format == Format::Q8_0, minimums = matrix.format == Format::Q4_1;
        const int code_bytes = bytes ? 512 : 256, factors = minimums ? 4 : 2;
        uint8_t* group = to;
        for (int g = 0; g < matrix.depth / GROUP; g++) {
            memcpy(group + code_bytes + 2 * lane, from, 2);
            if (minimums) memcpy(group + code_bytes + 2 * PANEL + 2 * lane, from + 2, 2);
            from += factors;
            for (int k = 0; k < GROUP; k++) {
                if (bytes) {
                    group[(k / 2 * PANEL + lane) * 2 + k % 2] = from[k];
                } else {
                    const int code = k < 16 ? from[k] & 15 : from[k - 16] >> 4;
                    group[(k / 8 * PANEL + lane) * 4 + k % 4] |= code << (k % 8 / 4 * 4);
                }
            }
            from += bytes ? 32 : 16;
            group += code_bytes + PANEL * factors;
        }
    }
}

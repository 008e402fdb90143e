// The values of a stretch as one row sees them. What it may not see has the weight 0, but may be NaN or infinite.
#pragma once

#include "kv.h"
#include "stretch.h"

// Memory for the values of a stretch. 8 bits are finite, and the scale of what has the weight 0 is not read.
template <KVType TYPE>
constexpr size_t seen_bytes(int dim) {
    return TYPE == KVType::BF16 ? size_t(STRETCH) * dim * sizeof(uint16_t) : 0;
}

// The stretch with zeros in place of the values before key `first` of it and from `end` on, in the blocks of the keys
// before `end`. Blocks of which the row sees only a part are copied to `memory` of `seen_bytes`.
template <KVType TYPE>
Stretch seen_values(const Stretch& stretch, int first, int end, int dim, uint8_t* memory) {
    Stretch seen = stretch;
    if constexpr (TYPE == KVType::INT8) return seen;
    for (int b = 0; b * BLOCK < end; b++) {
        const int begin = std::min(std::max(first - b * BLOCK, 0), BLOCK), stop = std::min(end - b * BLOCK, BLOCK);
        if (begin == 0 && stop == BLOCK) continue;
        constexpr int PAIR = PANEL * 2;  // numbers: two tokens of a panel
        uint16_t* to = reinterpret_cast<uint16_t*>(memory) + size_t(b) * dim * BLOCK;
        const uint16_t* from = reinterpret_cast<const uint16_t*>(stretch.values[b]);
        seen.values[b] = reinterpret_cast<const uint8_t*>(to);
        for (int pair = 0; pair < dim / PANEL * (BLOCK / 2); pair++, from += PAIR, to += PAIR) {
            const int token = pair % (BLOCK / 2) * 2;
            const bool even = token >= begin && token < stop, odd = token + 1 >= begin && token + 1 < stop;
            if (even && odd) {
                memcpy(to, from, PAIR * sizeof(uint16_t));
                continue;
            }
            memset(to, 0, PAIR * sizeof(uint16_t));
            for (int d = 0; d < PANEL && (even || odd); d++) to[2 * d + odd] = from[2 * d + odd];
        }
    }
    return seen;
}

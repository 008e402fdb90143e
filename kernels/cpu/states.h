// States of the layers that have one in place of keys and values.
#pragma once

#include <cstddef>
#include <cstdint>

// The slots that the rows of a step read and write.
struct RowStates {
    float* slots;                    // [slots][slot]
    size_t slot, layer;              // floats of a slot; where the layer begins in it
    const int32_t *reads, *writes;   // [rows]; the slot to read is -1 if the row has no state yet, which is zeros

    // A row's state of this layer, or null.
    const float* read(int row) const { return reads[row] < 0 ? nullptr : slots + reads[row] * slot + layer; }
    float* write(int row) const { return slots + writes[row] * slot + layer; }
};


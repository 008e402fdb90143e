// The tile registers of AMX (Intel, "Architecture Instruction Set Extensions", 319433, chapter 3): eight matrices of 16
// rows of 64 bytes. One instruction adds the product of two of them to a third.
//
// A thread chooses the shapes of its registers before it uses them; that takes hundreds of cycles, so there are few
// shapes. With EMULATE_TILES, the registers are ordinary memory, so that the data paths can be tested on any CPU.
#pragma once

#include "vec.h"

#if defined(AMX)
#include <algorithm>

#include <sys/syscall.h>
#include <unistd.h>

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // of a row, by register
    uint8_t rows[16] = {};
};

// Asks Linux to save the tile registers of this process. Whether it does.
INLINE bool request_tiles() {
#if defined(EMULATE_TILES)
    return true;
#else
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#endif
}

#if defined(EMULATE_TILES)

static_assert(LANES == TILE_BYTES / 4);

struct EmulatedTiles {
    TileShapes shapes;
    // What is beyond a register's shape is zero, as in the CPU.
    alignas(TILE_BYTES) uint8_t data[8][TILE_ROWS][TILE_BYTES];
};
static thread_local EmulatedTiles emulated;

static void set_tile_shapes(const TileShapes& shapes) {
    emulated.shapes = shapes;
    memset(emulated.data, 0, sizeof emulated.data);
}
static void release_tiles() {}

template <int T>
static void tile_zero() {
    memset(emulated.data[T], 0, sizeof emulated.data[T]);
}
template <int T>
static void tile_load(const void* from, size_t stride) {
    memset(emulated.data[T], 0, sizeof emulated.data[T]);
    for (int r = 0; r < emulated.shapes.rows[T]; r++)
        memcpy(emulated.data[T][r], static_cast<const uint8_t*>(from) + r * stride, emulated.shapes.bytes[T]);
}
template <int T>
static void tile_store(void* to, size_t stride) {
    for (int r = 0; r < emulated.shapes.rows[T]; r++)
        memcpy(static_cast<uint8_t*>(to) + r * stride, emulated.data[T][r], emulated.shapes.bytes[T]);
}

// C += A x B, where each row of A and of B has pairs of depth. A product of two bfloat16 numbers is exact in float32.
template <int C, int A, int B>
static void tile_dot_bf16() {
    for (int r = 0; r < emulated.shapes.rows[C]; r++) {
        vf sums[2] = {};
        for (int k = 0; k < emulated.shapes.bytes[A] / 4; k++) {
            const vu pair = load<uint32_t>(&emulated.data[A][r][4 * k]) - vu{}, pairs = load<vu>(emulated.data[B][k]);
            sums[0] = sums[0] + bits<vf>(pair << 16) * bits<vf>(pairs << 16);
            sums[1] = sums[1] + bits<vf>(pair & 0xFFFF0000u) * bits<vf>(pairs & 0xFFFF0000u);
        }
        store(emulated.data[C][r], load<vf>(emulated.data[C][r]) + (sums[0] + sums[1]));
    }
}

// C += A x B, where each row of A has fours of signed bytes of depth, and of B fours of unsigned ones.
template <int C, int A, int B>
static void tile_dot_int8() {
    for (int r = 0; r < emulated.shapes.rows[C]; r++) {
        vi sums = load<vi>(emulated.data[C][r]);
        for (int k = 0; k < emulated.shapes.bytes[A] / 4; k++)
            sums = dot_bytes(sums, load<vu>(emulated.data[B][k]), load<uint32_t>(&emulated.data[A][r][4 * k]) - vu{});
        store(emulated.data[C][r], sums);
    }
}

#else

// The instructions as text: the compilers' intrinsics take only literal numbers of registers, and GCC 12's don't say all
// that they read. The operands of type array tell the compiler what is read and written.
INLINE void set_tile_shapes(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
INLINE void release_tiles() { asm volatile("tilerelease"); }

template <int T>
INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
INLINE void tile_load(const void* from, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T), "m"(*(const uint8_t(*)[])from));
}
template <int T>
INLINE void tile_store(void* to, size_t stride) {
    asm volatile("tilestored %%tmm%c3, (%1,%2,1)" : "=m"(*(uint8_t(*)[])to) : "r"(to), "r"(stride), "i"(T));
}

// C += A x B.
template <int C, int A, int B>
INLINE void tile_dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
INLINE void tile_dot_int8() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

static thread_local const TileShapes* current_shapes = nullptr;

// Gives a thread's registers these shapes, if they have others. The shapes must outlive the thread's TileUse.
INLINE void use_tile_shapes(const TileShapes& shapes) {
    if (current_shapes == &shapes) return;
    current_shapes = &shapes;
    set_tile_shapes(shapes);
}

// Releases a thread's registers at its end, so that the system need not save them when it interrupts the thread.
struct TileUse {
    TileUse() = default;
    TileUse(const TileUse&) = delete;
    ~TileUse() {
        if (current_shapes) release_tiles();
        current_shapes = nullptr;
    }
};
#endif

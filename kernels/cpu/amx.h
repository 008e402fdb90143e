// The tile registers of AMX (Intel, "Architecture Instruction Set Extensions", 319433, chapter 3): eight matrices of 16
// rows of 64 bytes. One instruction adds the product of two of them to a third.
//
// A thread chooses the shapes of its registers before it uses them; that takes hundreds of cycles, so there are few
// shapes. With EMULATE, the registers are ordinary memory, so that the data paths can be tested on any CPU.
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
#if defined(EMULATE)
    return true;
#else
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#endif
}

#if defined(EMULATE)

struct EmulatedTiles {
    TileShapes shapes;
    uint8_t data[8][TILE_ROWS][TILE_BYTES];

    // The number of type T that row `r` of a register has at `i`.
    template <class T>
    T& at(int tile, int r, int i) {
        return reinterpret_cast<T*>(data[tile][r])[i];
    }
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

// C += A x B, where each row of A and of B has pairs of depth.
template <int C, int A, int B>
static void tile_dot_bf16() {
    const auto widen = [](uint16_t half) { return bits<float>(uint32_t(half) << 16); };
    for (int r = 0; r < emulated.shapes.rows[C]; r++)
        for (int n = 0; n < emulated.shapes.bytes[C] / 4; n++) {
            float sums[2] = {};
            for (int k = 0; k < emulated.shapes.bytes[A] / 2; k++)
                sums[k % 2] = std::fma(widen(emulated.at<uint16_t>(A, r, k)),
                                       widen(emulated.at<uint16_t>(B, k / 2, 2 * n + k % 2)), sums[k % 2]);
            emulated.at<float>(C, r, n) += sums[0] + sums[1];
        }
}

// C += A x B, where each row of A has fours of signed bytes of depth, and of B fours of unsigned ones.
template <int C, int A, int B>
static void tile_dot_int8() {
    for (int r = 0; r < emulated.shapes.rows[C]; r++)
        for (int n = 0; n < emulated.shapes.bytes[C] / 4; n++)
            for (int k = 0; k < emulated.shapes.bytes[A]; k++)
                emulated.at<int32_t>(C, r, n) +=
                    int32_t(emulated.at<int8_t>(A, r, k)) * int32_t(emulated.at<uint8_t>(B, k / 4, 4 * n + k % 4));
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

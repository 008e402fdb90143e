// Measures the peak rates of this machine: reading memory, and each kind of arithmetic that the kernels use.
//
// Each measurement runs on a number of threads for some seconds and returns the sum of the threads' rates, or -1 if the
// threads can't be started.
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

#include "amx.h"
#include "vec.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int CHAINS = 12;  // Sums that don't wait for each other: more than any CPU has products under way.
#if defined(ISA_AVX512)
constexpr int CODE_CHAINS = CHAINS;
#else
constexpr int CODE_CHAINS = 8;  // Their sums wait for a mere addition, and GCC wants a register for each product too.
#endif
constexpr int ROUNDS = 4096;       // between two looks at the clock
constexpr size_t PIECE = 1 << 20;  // bytes between two looks at the clock

std::atomic<float> sink;  // Results go where a compiler must believe that somebody reads them.

// The compiler forgets what it knows of a value, so it computes each product anew. It costs no instruction.
template <class Vector>
INLINE void forget(Vector& value) {
#if defined(__AVX512F__)
    asm volatile("" : "+v"(value));
#elif defined(__x86_64__)
    asm volatile("" : "+x"(value));
#elif defined(__aarch64__)
    asm volatile("" : "+w"(value));
#else
    asm volatile("" : "+m"(value));
#endif
}

// Calls work(thread, running), which returns how much it has done, on each thread until the time is over. `running`
// says whether there is time left.
template <class Work>
double rate_of(int num_threads, double seconds, Work work) {
    enum { WAIT, GO, CANCEL };
    std::atomic<int> signal{WAIT};
    std::vector<double> rates(num_threads);
    std::vector<std::thread> threads;
    auto measure = [&](int thread) {
        while (signal.load(std::memory_order_acquire) == WAIT) std::this_thread::yield();
        if (signal.load(std::memory_order_relaxed) == CANCEL) return;
        const auto elapsed = [start = Clock::now()] {
            return std::chrono::duration<double>(Clock::now() - start).count();
        };
        const double done = work(thread, [&] { return elapsed() < seconds; });
        rates[thread] = done / elapsed();
    };
    bool complete = true;
    try {
        for (int i = 1; i < num_threads; i++) threads.emplace_back(measure, i);
    } catch (const std::system_error&) {
        complete = false;
    }
    signal.store(complete ? GO : CANCEL, std::memory_order_release);
    measure(0);
    for (auto& thread : threads) thread.join();
    double sum = 0;
    for (double rate : rates) sum += rate;
    return complete ? sum : -1;
}

// multiply() computes ROUNDS products of a vector for each chain; each product is `operations` sums and products.
template <class Multiply>
double rate_of_products(int num_threads, double seconds, int chains, int operations, Multiply multiply) {
    return rate_of(num_threads, seconds, [&](int, auto running) {
        double done = 0;
        do {
            sink.store(multiply(), std::memory_order_relaxed);
            done += double(ROUNDS) * chains * operations;
        } while (running());
        return done;
    });
}

float multiply_floats() {
    vf chains[CHAINS] = {}, a = splat(1.0f), b = splat(0.5f);
    for (int round = 0; round < ROUNDS; round++)
        for (vf& chain : chains) {
            forget(a);
            chain = fma(a, b, chain);
        }
    vf total{};
    for (const vf& chain : chains) total += chain;
    return sum(total);
}

#if defined(DOT_BF16) && !defined(AMX)
float multiply_bf16() {
    vf chains[CHAINS] = {};
    vu a = vu{} + 0x3F803F80u, b = vu{} + 0x3F003F00u;  // pairs of 1 and of 0.5
    for (int round = 0; round < ROUNDS; round++)
        for (vf& chain : chains) {
            forget(a);
            chain = dot_bf16(chain, a, b);
        }
    vf total{};
    for (const vf& chain : chains) total += chain;
    return sum(total);
}
#endif

float multiply_codes() {
    vu a = vu{} + 0x01010101u, b = a;
    vi chains[CODE_CHAINS] = {}, total{};
#if defined(ISA_AVX512)
    constexpr int AT_ONCE = ROUNDS;
#else
    constexpr int AT_ONCE = 8;  // as many as fit into the sums of 16 bits; then they are widened, as the kernels do
#endif
    for (int round = 0; round < ROUNDS; round += AT_ONCE) {
        for (int i = 0; i < AT_ONCE; i++)
            for (vi& chain : chains) {
                forget(a);
                chain = dot_nibbles(chain, a, b);
            }
        for (vi& chain : chains) {
            total += finish_nibbles(chain);
            chain = vi{};
        }
    }
    return float(total[0]);
}

#if defined(AMX)
// Operations per second of the tile registers.
double rate_of_tiles(int num_threads, double seconds) {
    if (!request_tiles()) return -1;
    return rate_of(num_threads, seconds, [&](int, auto running) {
        static const TileShapes full = [] {
            TileShapes shapes;
            std::fill_n(shapes.rows, 8, TILE_ROWS);
            std::fill_n(shapes.bytes, 8, TILE_BYTES);
            return shapes;
        }();
        const TileUse use;
        use_tile_shapes(full);
        double done = 0;
        do {
            for (int round = 0; round < ROUNDS / 16; round++)
                tile_dot_bf16<0, 4, 6>(), tile_dot_bf16<1, 4, 7>(), tile_dot_bf16<2, 5, 6>(), tile_dot_bf16<3, 5, 7>();
            done += ROUNDS / 16 * 4 * 2.0 * TILE_ROWS * TILE_ROWS * TILE_BYTES / 2;
        } while (running());
        return done;
    });
}
#endif

// A part of the buffer for each thread, in whole pieces.
struct Slice {
    uint8_t* start;
    size_t bytes;
};

Slice slice_of(uint8_t* buffer, size_t bytes, int num_threads, int thread) {
    const size_t each = bytes / PIECE / num_threads * PIECE;
    return {buffer + thread * each, each};
}

// Two places at once keep more lines under way than one does: a fifth more bytes a second on a Zen 3.
INLINE vu add_up(const uint8_t* from) {
    constexpr int STREAMS = 2, AT_ONCE = 4;
    vu sums[STREAMS][AT_ONCE] = {}, total{};
    for (size_t at = 0; at < PIECE / STREAMS; at += AT_ONCE * sizeof(vu))
        for (int s = 0; s < STREAMS; s++)
            for (int i = 0; i < AT_ONCE; i++)
                sums[s][i] += load<vu>(from + s * (PIECE / STREAMS) + at + i * sizeof(vu));
    for (const auto& stream : sums)
        for (const vu& sum : stream) total += sum;
    return total;
}

}  // namespace

extern "C" {

// Memory for peak_read, in huge pages where the system has them; each thread's part is first written by one thread of
// its own, so that it lies near a core. Null where the memory or the threads can't be had. bytes >= num_threads MiB.
void* peak_open(size_t bytes, int num_threads) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    madvise(memory, bytes, MADV_HUGEPAGE);
    uint8_t* buffer = static_cast<uint8_t*>(memory);
    const double rate = rate_of(num_threads, 0, [&](int thread, auto) {
        const Slice slice = slice_of(buffer, bytes, num_threads, thread);
        memset(slice.start, 1, slice.bytes);
        return 1.0;
    });
    if (rate >= 0) return memory;
    munmap(memory, bytes);
    return nullptr;
}

void peak_close(void* buffer, size_t bytes) { munmap(buffer, bytes); }

// Bytes read per second, by threads that each read their part of the buffer from its start and over again.
double peak_read(void* buffer, size_t bytes, int num_threads, double seconds) {
    return rate_of(num_threads, seconds, [&](int thread, auto running) {
        const Slice slice = slice_of(static_cast<uint8_t*>(buffer), bytes, num_threads, thread);
        size_t at = 0;
        double done = 0;
        vu total{};
        do {
            total += add_up(slice.start + at);
            done += PIECE;
            at = at + PIECE == slice.bytes ? 0 : at + PIECE;
        } while (running());
        sink.store(float(total[0]), std::memory_order_relaxed);
        return done;
    });
}

// Operations per second, a product and its sum being two, of vectors that stay in registers.
double peak_float32(int num_threads, double seconds) {
    return rate_of_products(num_threads, seconds, CHAINS, 2 * LANES, multiply_floats);
}

// Without an instruction for bfloat16 the kernels widen weights and multiply floats.
double peak_bf16(int num_threads, double seconds) {
#if defined(AMX)
    return rate_of_tiles(num_threads, seconds);
#elif defined(DOT_BF16)
    return rate_of_products(num_threads, seconds, CHAINS, 4 * LANES, multiply_bf16);
#else
    return rate_of_products(num_threads, seconds, CHAINS, 2 * LANES, multiply_floats);
#endif
}

double peak_int8(int num_threads, double seconds) {
    return rate_of_products(num_threads, seconds, CODE_CHAINS, 8 * LANES, multiply_codes);
}

}  // extern "C"

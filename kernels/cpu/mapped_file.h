// A file of weights in memory.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "thread_pool.h"

// The file's first `bytes`, read only, at a multiple of 2 MiB: there the kernel can use huge pages for it, if the file was
// written in pieces of that size. All pages are read here, so that no step waits for them. Null if the system refuses.
static void* mapped_file(ThreadPool& thread_pool, int fd, size_t bytes) {
    constexpr size_t HUGE_PAGE = 2 << 20, PART = 16 * HUGE_PAGE, PAGE = 4096;
    const size_t reserved = bytes + HUGE_PAGE;
    void* room = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return nullptr;
    uint8_t* const begin = static_cast<uint8_t*>(room);
    uint8_t* const memory = begin + (HUGE_PAGE - reinterpret_cast<uintptr_t>(begin) % HUGE_PAGE) % HUGE_PAGE;
    if (mmap(memory, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        munmap(room, reserved);
        return nullptr;
    }
    uint8_t* const end = memory + (bytes + PAGE - 1) / PAGE * PAGE;
    if (memory > begin) munmap(begin, memory - begin);
    if (begin + reserved > end) munmap(end, begin + reserved - end);
#if defined(MADV_HUGEPAGE)
    madvise(memory, bytes, MADV_HUGEPAGE);  // only a hint
#endif
    thread_pool.each(int((bytes + PART - 1) / PART), [=](int i) {
        const size_t first = i * PART, last = std::min(first + PART, bytes);
#if defined(MADV_POPULATE_READ)
        if (madvise(memory + first, last - first, MADV_POPULATE_READ) == 0) return;
#endif
        for (size_t place = first; place < last; place += PAGE) *static_cast<volatile uint8_t*>(memory + place);
    });
    return memory;
}

// Copies the file's first `bytes` to memory, by all threads. Returns whether all of them could be read.
static bool read_file(ThreadPool& thread_pool, int fd, uint8_t* memory, size_t bytes) {
    constexpr size_t PART = 4 << 20;
    std::atomic<bool> is_whole{true};
    thread_pool.each(int((bytes + PART - 1) / PART), [&](int i) {
        const size_t end = std::min((i + 1) * PART, bytes);
        for (size_t place = i * PART; place < end;) {
            const ssize_t count = pread(fd, memory + place, end - place, off_t(place));
            if (count > 0)
                place += size_t(count);
            else if (count == 0 || errno != EINTR)
                return is_whole.store(false);
        }
    });
    return is_whole.load();
}

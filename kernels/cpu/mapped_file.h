// A file of weights in memory, without a copy.
#pragma once

#include <sys/mman.h>

#include <algorithm>

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

// A file of weights in memory, and memory that is touched beside the steps.
#pragma once

#include <fcntl.h>
#include <limits.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "thread_pool.h"

// The file's first `bytes`, read only, at a multiple of 2 MiB: there the kernel can use huge pages for it, if the file was
// written in pieces of that size. All pages are read here, so that no step waits for them. Null if the system refuses, or
// if a page can't be read.
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
    std::atomic<bool> is_whole{true};
    thread_pool.each(int((bytes + PART - 1) / PART), [&](int i) {
        const size_t first = i * PART, last = std::min(first + PART, bytes);
#if defined(MADV_POPULATE_READ)
        if (madvise(memory + first, last - first, MADV_POPULATE_READ) == 0) return;
        // Touching a page that can't be read would be a SIGBUS. EINVAL: Linux is older than 5.14, and can't say.
        if (errno != EINVAL) return is_whole.store(false);
#endif
        for (size_t place = first; place < last; place += PAGE) *static_cast<volatile uint8_t*>(memory + place);
    });
    if (is_whole.load()) return memory;
    munmap(memory, bytes);
    return nullptr;
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

// A part of a file to write: bytes of memory, or zeros where that is null.
struct Extent {
    const uint8_t* memory;
    size_t bytes;
};

// Writes a file's bytes to disk while more are added, and waits for those that were added `DEPTH` steps before. So only
// little is left for fdatasync, which can't be interrupted: a process that is killed ends when it returns.
class Writeback {
   public:
    Writeback(int fd, size_t step) : _fd(fd), _lag(DEPTH * off_t(step)) {}

    // The file now ends here. Returns 0, or errno.
    int advance(off_t end) {
        if (const int error = sync(_begun, end, false)) return error;
        _begun = end;
        return end - _lag > _done ? wait(end - _lag) : 0;
    }

    // Waits until the bytes before `end` are on disk. Returns 0, or errno.
    int wait(off_t end) {
        if (const int error = sync(_done, end, true)) return error;
        _done = end;
        return 0;
    }

    off_t done() const { return _done; }

   private:
    static constexpr off_t DEPTH = 8;

    int sync(off_t begin, off_t end, bool waits) {
#if defined(SYNC_FILE_RANGE_WRITE)
        const unsigned wait = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
        if (!_is_supported || begin >= end) return 0;
        if (sync_file_range(_fd, begin, end - begin, waits ? wait : unsigned(SYNC_FILE_RANGE_WRITE)) == 0) return 0;
        // An error of the disk is reported once, so fdatasync may not report it again.
        if (errno == EIO || errno == ENOSPC || errno == EDQUOT) return errno;
        _is_supported = false;
#endif
        return 0;
    }

    const int _fd;
    const off_t _lag;
    off_t _begun = 0, _done = 0;
    bool _is_supported = true;
};

// Touches each page of the extents, `piece` bytes of each in turns, until `stopped` becomes 1. A page fault takes no lock
// that the system calls of other threads wait for, as MADV_POPULATE_WRITE would, which may wait long for a core at this
// priority.
static void touch_extents(const Extent* extents, int count, size_t piece, const std::atomic<int>* stopped) {
    constexpr size_t PAGE = 4096;
    std::thread([=] {
        setpriority(PRIO_PROCESS, 0, 19);  // of this thread only, on Linux; if it is refused, the priority stays
        size_t most = 0;
        for (int i = 0; i < count; i++) most = std::max(most, extents[i].bytes);
        for (size_t begin = 0; begin < most; begin += piece)
            for (int i = 0; i < count; i++)
                for (size_t place = begin; place < std::min(begin + piece, extents[i].bytes); place += PAGE) {
                    if (stopped->load(std::memory_order_relaxed)) return;
                    // Writes what is there at once, whatever other threads write.
                    __atomic_fetch_or(const_cast<uint8_t*>(extents[i].memory) + place, 0, __ATOMIC_RELAXED);
                }
    }).join();
}

// Writes extents one behind the other, `piece` bytes at once, and waits until they are on disk, unless `stopped` becomes 1.
// Returns 0, or errno. A thread of the lowest priority does it: it takes the time that steps leave. It holds no lock that a
// step waits for, as Python code would at that priority.
static int write_extents(int fd, const Extent* extents, int count, size_t piece, const std::atomic<int>* stopped) {
    constexpr size_t ZEROS = 4096;
    static const uint8_t zeros[ZEROS] = {};
    int error = 0;
    std::thread([&] {
        setpriority(PRIO_PROCESS, 0, 19);  // of this thread only, on Linux; if it is refused, the priority stays
        std::vector<iovec> parts;
        off_t place = 0;
        size_t held = 0;
        Writeback writeback(fd, piece);
        const auto flush = [&] {
            for (size_t first = 0; first < parts.size() && !error;) {
                if (stopped->load()) error = ECANCELED;
                if (error) break;
                const ssize_t written = pwritev(fd, parts.data() + first, int(parts.size() - first), place);
                if (written < 0 && errno != EINTR) error = errno;
                place += std::max<ssize_t>(written, 0);
                for (size_t left = std::max<ssize_t>(written, 0); left;) {  // a part of them, if the disk is nearly full
                    const size_t taken = std::min(left, parts[first].iov_len);
                    parts[first].iov_base = static_cast<uint8_t*>(parts[first].iov_base) + taken;
                    parts[first].iov_len -= taken, left -= taken;
                    if (!parts[first].iov_len) first++;
                }
            }
            parts.clear(), held = 0;
            if (!error) error = writeback.advance(place);
        };
        for (int i = 0; i < count && !error; i++)
            for (size_t done = 0; done < extents[i].bytes && !error;) {
                const uint8_t* memory = extents[i].memory;
                size_t bytes = std::min(extents[i].bytes - done, piece - held);
                if (!memory) bytes = std::min(bytes, ZEROS);
                parts.push_back({const_cast<uint8_t*>(memory ? memory + done : zeros), bytes});
                done += bytes, held += bytes;
                if (held == piece || parts.size() == IOV_MAX) flush();
            }
        flush();
        while (!error && writeback.done() < place)
            error = stopped->load() ? ECANCELED : writeback.wait(std::min(place, writeback.done() + off_t(piece)));
        if (!error && fdatasync(fd)) error = errno;
    }).join();
    return error;
}

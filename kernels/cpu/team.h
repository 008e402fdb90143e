// The threads that compute a step together.
//
//     asleep ──run()──► computing ──barrier──► computing ── … ──last barrier──► spinning ──a while──► asleep
//
// A thread that waits looks for its fellows for some microseconds and then sleeps in the kernel: other processes share
// these cores, and a core that is spun away may be the very one that a fellow needs.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

class Team {
   public:
    // `spins` is how often a waiting thread looks before it sleeps.
    Team(int size, int spins) : size_(size), spins_(spins) {
        for (int i = 1; i < size; i++) threads_.emplace_back([this, i] { serve(i); });
    }

    ~Team() {
        job_ = nullptr;
        barrier();
        for (auto& thread : threads_) thread.join();
    }

    int size() const { return size_; }

    // Calls job(context, thread) on every thread, the caller's among them, and returns when all have returned.
    void run(void (*job)(void*, int), void* context) {
        job_ = job;
        context_ = context;
        barrier();
        job(context, 0);
        barrier();
    }

    // Calls work(i) for i from 0 to count - 1, on whichever thread is free.
    template <class Work>
    void each(int count, Work work) {
        struct Job {
            Work work;
            int count;
            std::atomic<int> next{0};
        } job{work, count, {}};
        run(
            [](void* context, int) {
                Job& job = *static_cast<Job*>(context);
                for (int i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.count;) job.work(i);
            },
            &job);
    }

    // Returns when every thread has come here. What was written before is seen by all after.
    void barrier() {
        if (size_ == 1) return;
        const int now = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(now + 1, std::memory_order_seq_cst);
            phase_.notify_all();
            return;
        }
        for (int i = 0; i < spins_; i++) {
            if (phase_.load(std::memory_order_acquire) != now) return;
            relax();
        }
        phase_.wait(now, std::memory_order_acquire);
    }

   private:
    static void relax() {
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("isb");
#endif
    }

    void serve(int thread) {
        for (;;) {
            barrier();
            if (!job_) return;
            job_(context_, thread);
            barrier();
        }
    }

    const int size_, spins_;
    void (*job_)(void*, int) = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<int> phase_{0};
    alignas(64) std::atomic<int> arrived_{0};
    std::vector<std::thread> threads_;
};

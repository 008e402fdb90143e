// A pool of threads that compute an op together.
//
//     asleep ──start()──► working ──the job returns──► watching ──a while──► asleep
//
// Threads wait only for work that another thread has begun, never for a thread to arrive: other processes share these
// cores, and a descheduled thread must not delay the others. So a job may return on the caller's thread while others are
// still in it, or enter it late; `settle` waits until all have left.
//
// A waiting thread spins for some microseconds and then sleeps in the kernel, because it may occupy the core that
// another thread needs.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Work that every thread may join, once per `start`.
class Job {
   public:
    virtual ~Job() = default;
    virtual void work(int thread) = 0;
};

class ThreadPool {
   public:
    // `spins` is the number of spins of a waiting thread before it sleeps.
    ThreadPool(int size, int spins) : size_(size), spins_(spins) {
        for (int i = 1; i < size; i++) threads_.emplace_back([this, i] { serve(i); });
    }

    ~ThreadPool() {
        ending_.store(true);
        wake();
        for (auto& thread : threads_) thread.join();
    }

    int size() const { return size_; }

    // Lets the other threads join `job`; the caller joins it itself. The job must live until `settle`.
    void start(Job* job) {
        job_.store(job);
        wake();
    }

    // Returns when no thread is in a job, or will enter the one that was started last.
    void settle() {
        job_.store(nullptr);
        wait([this] { return inside_.load() == 0; }, inside_);
    }

    // Returns when `ready` does; `word` is changed, with notice, before that can come to be.
    template <class Ready>
    void wait(Ready ready, const std::atomic<int>& word) const {
        for (int i = 0; i < spins_; i++) {
            if (ready()) return;
            relax();
        }
        for (;;) {
            const int seen = word.load();
            if (ready()) return;
            word.wait(seen);
        }
    }

    // Calls work(i) for i from 0 to count - 1, on whichever thread is free, and returns when all have returned.
    template <class Work>
    void each(int count, Work work) {
        class Each final : public Job {
           public:
            Each(int count, Work& work) : count_(count), work_(work) {}
            void work(int) override {
                for (int i; (i = next_.fetch_add(1)) < count_;) work_(i);
            }

           private:
            const int count_;
            Work& work_;
            std::atomic<int> next_{0};
        } job(count, work);
        start(&job);
        job.work(0);
        settle();
    }

   private:
    static void relax() {
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("isb");
#endif
    }

    void wake() {
        starts_.fetch_add(1);
        starts_.notify_all();
    }

    void serve(int thread) {
        for (int seen = 0;;) {
            wait([&] { return starts_.load() != seen; }, starts_);
            seen = starts_.load();
            if (ending_.load()) return;
            // Before reading the job, so that either `settle` sees this thread inside, or this thread finds no job.
            inside_.fetch_add(1);
            if (Job* job = job_.load()) job->work(thread);
            if (inside_.fetch_sub(1) == 1) inside_.notify_all();
        }
    }

    const int size_, spins_;
    std::atomic<Job*> job_{nullptr};
    std::atomic<bool> ending_{false};
    alignas(64) std::atomic<int> starts_{0};
    alignas(64) std::atomic<int> inside_{0};
    std::vector<std::thread> threads_;
};

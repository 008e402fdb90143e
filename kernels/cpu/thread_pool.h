// The threads that compute an op together.
//
//     asleep ──start()──► working ──the job returns──► watching ──a while──► asleep
//
// Nobody waits for a thread to come, only for work that a thread has begun: other processes share these cores, and a
// thread that is kept from running must not keep its fellows. So a job may return on the caller's thread while others
// are still on their way through it, or come to it late; `settle` is for what must be over for all of them.
//
// Who waits looks for some microseconds and then sleeps in the kernel: a core that is spun away may be the very one
// that a fellow needs.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Work that any thread may join, once for each `start`.
class Job {
   public:
    virtual ~Job() = default;
    virtual void work(int thread) = 0;
};

class ThreadPool {
   public:
    // `spins` is how often a waiting thread looks before it sleeps.
    ThreadPool(int size, int spins) : size_(size), spins_(spins) {
        for (int i = 1; i < size; i++) threads_.emplace_back([this, i] { serve(i); });
    }

    ~ThreadPool() {
        ending_.store(true);
        wake();
        for (auto& thread : threads_) thread.join();
    }

    int size() const { return size_; }

    // The other threads join `job`; the caller does so by itself. The job must live until `settle`.
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
            // Before the job is read: so `settle` either sees this thread inside, or it finds no job.
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

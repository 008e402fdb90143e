// The end of a step: waiting for the masks that a grammar allows, then one id for each sampled token.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "linear.h"
#include "sample.h"
#include "step.h"

// Where masks are told to be complete. The word may lie in memory that another process writes.
struct MaskTicket {
    const uint32_t* word;  // null: nothing to wait for
    uint32_t wanted;
    int32_t timeout_ms;
};

// Begins when the logits are there and ends when `*word` is `wanted`, or with status 1 when that takes too long.
class WaitForMasks final : public Op {
   public:
    // `best` [num_best] is what the head has found; a step that ends here leaves none of it to the next.
    WaitForMasks(const MaskTicket* ticket, Best* best, size_t num_best)
        : Op("wait_for_masks"), ticket_(ticket), best_(best), num_best_(num_best) {}

    // The ticket changes between steps, and a thread may be late to leave one: tiles and status must not follow it.
    int tiles(const Step&) const override { return 1; }

    void tile(const Step&, int, const Scratch&) override {
        late_ = false;
        if (!ticket_->word) return;
        const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(ticket_->timeout_ms);
        // Masks are computed while the forward pass runs and are nearly always there by now, so this looks often at
        // first, and rarely only where whoever writes them is held up.
        for (int looks = 0; __atomic_load_n(ticket_->word, __ATOMIC_ACQUIRE) != ticket_->wanted; looks++) {
            if (std::chrono::steady_clock::now() > end) {
                late_ = true;
                std::fill_n(best_, num_best_, NO_BEST);
                return;
            }
            if (looks < 1000)
                std::this_thread::yield();
            else
                std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }

    int status() const override { return late_ ? 1 : 0; }

   private:
    const MaskTicket* const ticket_;
    Best* const best_;
    const size_t num_best_;
    std::atomic<bool> late_{false};
};

// What sampling reads of each sampled token: arrays over a step's samples (kernels/step_inputs.py).
struct Draws {
    const uint8_t* greedy;  // the largest logit as it is: no filter, no penalty, no mask
    const float *temperature, *top_p, *min_p;
    const int32_t* top_k;
    const uint64_t* keys;
    const float *repetition, *presence, *frequency;
    const int32_t* const* history;  // known ids of the row, or null where no penalty is set
    const int32_t *num_prompt, *num_known;
    const uint32_t* const* masks;  // bit v of word v / 32: whether id v is allowed; or null
    int32_t* ids;
    const uint8_t* scored;  // whether the id's log probability is asked for; not where `greedy` is set
    float* logprobs;
};

class Pick final : public Op {
   public:
    Pick(const Draws& draws, float* logits, Best* best, int max_samples, int threads, int vocab_size)
        : Op("pick"), draws_(draws), logits_(logits), best_(best), max_samples_(max_samples), threads_(threads),
          vocab_size_(vocab_size) {}

    int tiles(const Step& step) const override { return step.samples; }

    size_t scratch_bytes() const override { return sample_scratch_bytes(vocab_size_) + size_t(vocab_size_) * 4; }

    void tile(const Step&, int row, const Scratch& scratch) override {
        if (draws_.greedy[row]) {
            draws_.ids[row] = take_best(row);
            return;
        }
        float* logits = logits_ + size_t(row) * vocab_size_;
        const float* model = logits;  // its own distribution, which is what ids are scored by
        if (draws_.scored[row] && (draws_.history[row] || draws_.masks[row])) {
            float* const copy = reinterpret_cast<float*>(scratch.memory + sample_scratch_bytes(vocab_size_));
            memcpy(copy, logits, size_t(vocab_size_) * 4);
            model = copy;
        }
        if (draws_.history[row])
            penalize(logits, vocab_size_, draws_.history[row], draws_.num_prompt[row], draws_.num_known[row],
                     draws_.repetition[row], draws_.presence[row], draws_.frequency[row], scratch.memory);
        if (draws_.masks[row]) mask(logits, vocab_size_, draws_.masks[row]);
        draws_.ids[row] = draws_.temperature[row] < GREEDY_BELOW
                              ? greedy(logits, vocab_size_)
                              : draw(logits, vocab_size_, draws_.temperature[row], draws_.top_k[row],
                                     draws_.top_p[row], draws_.min_p[row], draws_.keys[row], scratch.memory);
        if (draws_.scored[row])
            draws_.logprobs[row] = log_probability(model, vocab_size_, draws_.ids[row], scratch.memory);
    }

   private:
    static constexpr float GREEDY_BELOW = 1e-5f;  // as in stages/execute/sampler.py

    // The threads' best, left empty for the next step. Of equal logits the lowest id wins.
    int32_t take_best(int row) const {
        Best found = NO_BEST;
        for (int thread = 0; thread < threads_; thread++) {
            Best& best = best_[size_t(thread) * max_samples_ + row];
            if (best.value > found.value || (best.value == found.value && best.id < found.id)) found = best;
            best = NO_BEST;
        }
        return found.id;
    }

    const Draws draws_;
    float* const logits_;
    Best* const best_;
    const int max_samples_, threads_, vocab_size_;
};

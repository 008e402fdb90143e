// The end of a step: waits for grammar masks, then samples an id for each sampled token.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "linear.h"
#include "logprobs.h"
#include "sample.h"
#include "logits_processors.h"
#include "step.h"

// Signals that masks are complete. The word may be in memory that another process writes.
struct MaskTicket {
    const uint32_t* word;  // null: nothing to wait for
    uint32_t expected;
    int32_t timeout_ms;
};

// Waits until `*word` is `expected`, or ends with status 1 after a timeout. Runs when the logits are complete.
class WaitForMasks final : public Op {
   public:
    // `best` [num_best] are the head's results; a step that ends here clears them for the next.
    WaitForMasks(const MaskTicket* ticket, Best* best, size_t num_best)
        : Op("wait_for_masks"), ticket_(ticket), best_(best), num_best_(num_best) {}

    // The ticket changes between steps, and a thread may be late to leave one: tiles and status must not follow it.
    int tiles(const Step&) const override { return 1; }

    void tile(const Step&, int, const Scratch&) override {
        late_ = false;
        if (!ticket_->word) return;
        const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(ticket_->timeout_ms);
        // Masks are computed while the forward pass runs and are nearly always there by now, so this looks often at
        // first, and rarely only if their writer is delayed.
        for (int looks = 0; __atomic_load_n(ticket_->word, __ATOMIC_ACQUIRE) != ticket_->expected; looks++) {
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

// What sampling reads of each sampled token: arrays over a step's samples (kernels/sampling/sampling_inputs.py).
struct SamplingInputs {
    const uint8_t* greedy;  // the largest logit, and nothing else is requested
    const float *temperature, *top_p, *min_p;
    const int32_t* top_k;
    const uint64_t* keys;
    const LogitsProcessors* const* logits_processors;  // or null where logits are taken as they are
    const int32_t* num_known;        // ids of the row; read if it has logits processors
    const uint32_t* const* masks;    // what a grammar allows, or null
    int32_t* ids;
    const int32_t* num_top;
    uint8_t* const* logprobs;  // or null for no logprobs; not read where `greedy` is set
    const int32_t* const* given_ids;  // ids that the logprobs are of, or null for the likeliest
};

class Sample final : public Op {
   public:
    Sample(const SamplingInputs& inputs, float* logits, Best* best, int max_samples, int threads, int vocab_size)
        : Op("sample"), inputs_(inputs), logits_(logits), best_(best), max_samples_(max_samples), threads_(threads),
          vocab_size_(vocab_size) {}

    int tiles(const Step& step) const override { return step.samples; }

    size_t scratch_bytes() const override { return sample_scratch_bytes(vocab_size_) + size_t(vocab_size_) * 4; }

    void tile(const Step&, int row, const Scratch& scratch) override {
        if (inputs_.greedy[row]) {
            inputs_.ids[row] = take_best(row);
            return;
        }
        float* logits = logits_ + size_t(row) * vocab_size_;
        const LogitsProcessors* const logits_processors = inputs_.logits_processors[row];
        const uint32_t* const allowed = inputs_.masks[row];
        uint8_t* const logprobs = inputs_.logprobs[row];
        const float* model = logits;  // its own distribution, which is what ids are scored by
        if (logprobs && (logits_processors || allowed)) {
            float* const copy = reinterpret_cast<float*>(scratch.memory + sample_scratch_bytes(vocab_size_));
            memcpy(copy, logits, size_t(vocab_size_) * 4);
            model = copy;
        }
        if (allowed) mask(logits, vocab_size_, allowed);
        if (logits_processors) apply_logits_processors(logits, vocab_size_, *logits_processors, inputs_.num_known[row], scratch.memory, allowed);
        const int32_t id = inputs_.temperature[row] < GREEDY_BELOW
                               ? greedy(logits, vocab_size_)
                               : sample(logits, vocab_size_, inputs_.temperature[row], inputs_.top_k[row],
                                      inputs_.top_p[row], inputs_.min_p[row], inputs_.keys[row], scratch.memory);
        inputs_.ids[row] = id;
        if (logprobs && id != NO_ID)
            write_logprobs(model, vocab_size_, id, inputs_.num_top[row], inputs_.given_ids[row], logprobs,
                           scratch.memory);
    }

   private:
    static constexpr float GREEDY_BELOW = 1e-5f;  // as in kernels/sampling/sampling_inputs.py

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

    const SamplingInputs inputs_;
    float* const logits_;
    Best* const best_;
    const int max_samples_, threads_, vocab_size_;
};

// Given ids, such as a prompt's, and where their logprobs go (kernels/sampling/logprob_inputs.py).
struct Scores {
    const int32_t *ids, *num_top;
    uint8_t* const* logprobs;
};

class Score final : public Op {
   public:
    Score(const Scores& scores, const float* logits, int vocab_size)
        : Op("score"), scores_(scores), logits_(logits), vocab_size_(vocab_size) {}

    int tiles(const Step& step) const override { return step.samples; }

    size_t scratch_bytes() const override { return sample_scratch_bytes(vocab_size_); }

    void tile(const Step&, int row, const Scratch& scratch) override {
        write_logprobs(logits_ + size_t(row) * vocab_size_, vocab_size_, scores_.ids[row], scores_.num_top[row],
                       nullptr, scores_.logprobs[row], scratch.memory);
    }

   private:
    const Scores scores_;
    const float* const logits_;
    const int vocab_size_;
};

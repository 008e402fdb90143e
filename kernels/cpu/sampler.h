// The end of a step: waiting for the masks that a grammar allows, then one id for each sampled token.
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

// What sampling reads of each sampled token: arrays over a step's samples (kernels/sampling_inputs.py).
struct Draws {
    const uint8_t* greedy;  // the largest logit as it is, and nothing else is wanted
    const float *temperature, *top_p, *min_p;
    const int32_t* top_k;
    const uint64_t* keys;
    const Shaping* const* shapings;  // or null where logits are taken as they are
    const int32_t* num_known;        // ids of the row; read where it is shaped
    const uint32_t* const* masks;    // what a grammar allows, or null
    int32_t* ids;
    const int32_t* num_top;
    uint8_t* const* records;  // or null where none is wanted; not read where `greedy` is set
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
        const Shaping* const shaping = draws_.shapings[row];
        const uint32_t* const allowed = draws_.masks[row];
        uint8_t* const record = draws_.records[row];
        const float* model = logits;  // its own distribution, which is what ids are scored by
        if (record && (shaping || allowed)) {
            float* const copy = reinterpret_cast<float*>(scratch.memory + sample_scratch_bytes(vocab_size_));
            memcpy(copy, logits, size_t(vocab_size_) * 4);
            model = copy;
        }
        if (allowed) mask(logits, vocab_size_, allowed);
        if (shaping) shape(logits, vocab_size_, *shaping, draws_.num_known[row], scratch.memory, allowed);
        const int32_t id = draws_.temperature[row] < GREEDY_BELOW
                               ? greedy(logits, vocab_size_)
                               : draw(logits, vocab_size_, draws_.temperature[row], draws_.top_k[row],
                                      draws_.top_p[row], draws_.min_p[row], draws_.keys[row], scratch.memory);
        draws_.ids[row] = id;
        if (record && id != NO_ID) write_record(model, vocab_size_, id, draws_.num_top[row], record, scratch.memory);
    }

   private:
    static constexpr float GREEDY_BELOW = 1e-5f;  // as in kernels/sampling_inputs.py

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

// Ids that are given, rather than drawn, and where their records go (kernels/logprob_inputs.py).
struct Scores {
    const int32_t *ids, *num_top;
    uint8_t* const* records;
};

class Score final : public Op {
   public:
    Score(const Scores& scores, const float* logits, int vocab_size)
        : Op("score"), scores_(scores), logits_(logits), vocab_size_(vocab_size) {}

    int tiles(const Step& step) const override { return step.samples; }

    size_t scratch_bytes() const override { return sample_scratch_bytes(vocab_size_); }

    void tile(const Step&, int row, const Scratch& scratch) override {
        write_record(logits_ + size_t(row) * vocab_size_, vocab_size_, scores_.ids[row], scores_.num_top[row],
                     scores_.records[row], scratch.memory);
    }

   private:
    const Scores scores_;
    const float* const logits_;
    const int vocab_size_;
};

// Logits processors: masks, bad words, min_tokens, bias, penalties.
//
// kernels/sampling/logits_processors.py and kernels/sampling/penalties.py define them, in torch.
#pragma once

#include "vec.h"

// Of one row, for as long as it runs; `LOGITS_PROCESSORS` in kernels/sampling/logits_processor_inputs.py. Ids are of the
// vocabulary.
struct LogitsProcessors {
    float repetition, presence, frequency;
    int32_t num_prompt;
    const int32_t* ids;       // of the row: the prompt's, then the output's
    const uint32_t* allowed;  // a mask, or null
    const int32_t* bias_ids;
    const float* bias_values;
    const int32_t* enders;  // not sampled before the output has min_tokens ids
    const int32_t* runs;    // bad words: num_runs + 1 places in this array, where each begins and the last ends, then ids
    int32_t num_bias, num_enders, min_tokens, num_runs;
};

// Change a row's logits [vocab] in place by the ids known so far, `num_prompt` of the prompt and then the output's.
// The logit of an id that is among them is divided by `repetition` if it is above 0 and multiplied if not. Then
// `frequency` is subtracted for each time that the id is in the output, and `presence` once if it is there at all. Ids
// outside the vocabulary, such as image placeholders, are ignored. Costs O(num_ids).
static inline void penalize(float* logits, int vocab, const int32_t* ids, int num_prompt, int num_ids,
                            float repetition, float presence, float frequency, uint8_t* memory) {
    constexpr int32_t DONE = -1;
    int32_t* const counts = reinterpret_cast<int32_t*>(memory);
    const auto known = [=](int i) { return uint32_t(ids[i]) < uint32_t(vocab); };
    const int first = repetition == 1 ? num_prompt : 0;
    for (int i = first; i < num_ids; i++)
        if (known(i)) counts[ids[i]] = 0;
    for (int i = num_prompt; i < num_ids; i++)
        if (known(i)) counts[ids[i]]++;
    for (int i = first; i < num_ids; i++) {
        if (!known(i) || counts[ids[i]] == DONE) continue;
        float& logit = logits[ids[i]];
        const int32_t count = counts[ids[i]];
        counts[ids[i]] = DONE;
        logit = logit > 0 ? logit / repetition : logit * repetition;
        if (!count) continue;
        logit -= frequency * float(count);
        logit -= presence;
    }
}

// Set the logits [vocab] of ids that are not allowed to -inf: id v is allowed where bit v % 32 of word v / 32 is set,
// as llguidance writes it. Bits beyond the vocabulary are not read.
static inline void mask(float* logits, int vocab, const uint32_t* allowed) {
    vu lane_bits;
    for (int lane = 0; lane < LANES; lane++) lane_bits[lane] = 1u << lane;
    int v = 0;
    for (; v + 32 <= vocab; v += 32) {
        const uint32_t word = allowed[v / 32];
        if (word == ~0u) continue;
        for (int i = 0; i < 32; i += LANES) {
            const vi cleared = ((word >> i) & lane_bits) == 0;
            store(logits + v + i, cleared ? splat(-INFINITY) : load<vf>(logits + v + i));
        }
    }
    for (; v < vocab; v++)
        if (!(allowed[v / 32] >> (v % 32) & 1)) logits[v] = -INFINITY;
}

constexpr int32_t BEGIN = -1;  // as a bad word's first id: it stands before the output

// Set the logit of each bad word's last id to -inf if the output [num_output] ends with its other ids. The shortest
// words come first.
static inline void forbid_runs(float* logits, const int32_t* runs, int num_runs, const int32_t* output,
                               int num_output) {
    for (int i = 0; i < num_runs; i++) {
        const int32_t* const run = runs + runs[i];
        const int begins = *run == BEGIN;
        const int last = runs[i + 1] - runs[i] - 1, before = last - begins;
        if (last > num_output + 1) break;
        if (begins ? before != num_output : before > num_output) continue;
        if (before && run[last - 1] != output[num_output - 1]) continue;
        if (!memcmp(output + num_output - before, run + begins, before * sizeof(int32_t))) logits[run[last]] = -INFINITY;
    }
}

// Whether a grammar allows only ids of this list, which has no duplicates.
static inline bool allows_only(const uint32_t* grammar, int vocab, const int32_t* ids, int num_ids) {
    int num_others = 0;
    for (int i = 0; i < num_ids; i++) num_others -= grammar[ids[i] / 32] >> (ids[i] % 32) & 1;
    for (int word = 0; word < (vocab + 31) / 32; word++)
        if ((num_others += __builtin_popcount(grammar[word])) > 0) return false;
    return true;
}

// Change a row's logits [vocab] in place, by its first `num_known` ids. `memory` is of sample_scratch_bytes. `grammar`
// is what the row was masked by, or null: where it allows but an end, min_tokens does not forbid that.
static inline void apply_logits_processors(float* logits, int vocab, const LogitsProcessors& s, int num_known, uint8_t* memory,
                         const uint32_t* grammar = nullptr) {
    const int num_output = num_known - s.num_prompt;
    if (s.allowed) mask(logits, vocab, s.allowed);
    forbid_runs(logits, s.runs, s.num_runs, s.ids + s.num_prompt, num_output);
    if (num_output < s.min_tokens && !(grammar && allows_only(grammar, vocab, s.enders, s.num_enders)))
        for (int i = 0; i < s.num_enders; i++) logits[s.enders[i]] = -INFINITY;
    for (int i = 0; i < s.num_bias; i++) logits[s.bias_ids[i]] += s.bias_values[i];
    if (s.repetition != 1 || s.presence != 0 || s.frequency != 0)
        penalize(logits, vocab, s.ids, s.num_prompt, num_known, s.repetition, s.presence, s.frequency, memory);
}

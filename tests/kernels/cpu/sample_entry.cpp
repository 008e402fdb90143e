// sample.h, logits_processors.h and logprobs.h, as a test calls them.
#include "../../../kernels/cpu/logprobs.h"
#include "../../../kernels/cpu/sample.h"
#include "../../../kernels/cpu/logits_processors.h"

extern "C" {

size_t scratch_bytes(int vocab) { return sample_scratch_bytes(vocab); }

void penalize_row(float* logits, int vocab, const int32_t* ids, int num_prompt, int num_ids, float repetition,
                  float presence, float frequency, uint8_t* memory) {
    penalize(logits, vocab, ids, num_prompt, num_ids, repetition, presence, frequency, memory);
}

void mask_row(float* logits, int vocab, const uint32_t* allowed) { mask(logits, vocab, allowed); }

void logits_processors_row(float* logits, int vocab, const LogitsProcessors* logits_processors, int num_known, uint8_t* memory) {
    apply_logits_processors(logits, vocab, *logits_processors, num_known, memory);
}

void logprobs_row(const float* logits, int vocab, int32_t id, int num_top, const int32_t* given, uint8_t* out,
                  uint8_t* memory) {
    write_logprobs(logits, vocab, id, num_top, given, out, memory);
}

int32_t greedy_row(const float* logits, int vocab) { return greedy(logits, vocab); }

void sample_many(const float* logits, int vocab, float temperature, int top_k, float top_p, float min_p,
               const uint64_t* keys, int num_keys, int32_t* ids, uint8_t* memory) {
    for (int i = 0; i < num_keys; i++)
        ids[i] = sample(logits, vocab, temperature, top_k, top_p, min_p, keys[i], memory);
}

float floor_row(const float* logits, int vocab, float temperature, int top_k, float top_p, float min_p,
                uint8_t* bytes) {
    const sampling::SamplingScratch memory(bytes, vocab);
    const sampling::Row row(logits, vocab, memory);
    return floor_of(row, sampling::Softmax(row.top, temperature), top_k, top_p, min_p, memory);
}
}

// Which experts compute which tokens of a step: `Route` in experts.h writes it, the matmuls of a layer's experts read it.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

// Rows in expert order: those of the first expert that has any, in the order of their tokens, then those of the next one.
struct Routing {
    Routing(int experts, int per_token, int max_tokens)
        : experts(experts), per_token(per_token), active(experts), begin(experts + 1),
          tokens(size_t(max_tokens) * per_token), places(size_t(max_tokens) * per_token),
          weights(size_t(max_tokens) * per_token) {}

    const int experts, per_token;
    // Experts with rows. Atomic: who looks for something to prefetch may read it too early, and uses nothing of it.
    std::atomic<int> num_active{0};
    std::vector<int32_t> active;  // [num_active], ascending
    std::vector<int32_t> begin;   // [num_active + 1]: expert active[i] has the rows from begin[i] to begin[i + 1]
    std::vector<int32_t> tokens;  // [rows]: a row's token
    std::vector<int32_t> places;  // [tokens][per_token]: the row of each choice of a token, the best one first
    std::vector<float> weights;   // [tokens][per_token]: of the choices
};

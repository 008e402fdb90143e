// A tiny model with random weights, recorded through the library's C interface as stages/execute/cpu/native/program.py
// records a real one.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "attention.h"
#include "copy.h"
#include "pack.h"
#include "qkv.h"
#include "sampler.h"

class Program;

// The functions of program.cpp, from a shared library.
struct Library {
    explicit Library(const char* path) : handle(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
        if (!handle) fail(dlerror());
        find(abi_version, "abi_version"), find(prepare, "prepare"), find(thread_pool_new, "thread_pool_new");
        find(thread_pool_delete, "thread_pool_delete"), find(panel_bytes, "panel_bytes"), find(pack, "pack");
        find(touch, "touch"), find(copy_blocks, "copy_blocks"), find(act_bytes, "act_bytes");
        find(activation_bytes, "activation_bytes"), find(activation_rows, "activation_rows");
        find(program_new, "program_new");
        find(program_delete, "program_delete"), find(embed, "program_embed"), find(norm, "program_norm");
        find(quantize, "program_quantize"), find(qkv, "program_qkv"), find(attention_plan, "program_attention_plan");
        find(attention, "program_attention"), find(linear_add, "program_linear_add"), find(swiglu, "program_swiglu");
        find(sample, "program_sample"), find(score, "program_score"), find(run, "program_run");
        find(profile, "program_profile"), find(size, "program_size");
        if (!prepare()) fail("the system does not let this process use the library's instructions");
    }

    [[noreturn]] static void fail(const std::string& what) {
        fprintf(stderr, "%s\n", what.c_str());
        exit(1);
    }

    int (*abi_version)();
    int (*prepare)();
    ThreadPool* (*thread_pool_new)(int, int);
    void (*thread_pool_delete)(ThreadPool*);
    size_t (*panel_bytes)(const Matrix*);
    void (*pack)(ThreadPool*, const Matrix*, uint8_t*, const uint8_t* const*);
    void (*touch)(ThreadPool*, uint8_t*, size_t);
    void (*copy_blocks)(ThreadPool*, const Blocks*, const int32_t*, const int32_t*, int);
    int (*act_bytes)();
    size_t (*activation_bytes)(int, int);
    int (*activation_rows)(int);
    Program* (*program_new)(ThreadPool*, const Step*);
    void (*program_delete)(Program*);
    void (*embed)(Program*, float*, const Matrix*, float, const float*);
    void (*norm)(Program*, Rows, int, const float*, const float*, int, float, int);
    void (*quantize)(Program*, Rows, int, const float*, int);
    void (*qkv)(Program*, Rows, const Product*, int, int, const KV*, const float*, const float*, const HeadNorms*,
                const QueryOptions*, float*);
    AttentionPlan* (*attention_plan)(Program*, int, int, int);
    void (*attention)(Program*, Rows, int, Rows, const KV*, const AttentionPlan*, const ScoreOptions*);
    void (*linear_add)(Program*, float*, Rows, const Matrix*, int, float);
    void (*swiglu)(Program*, Rows, int, const Product*, int, int);
    void (*sample)(Program*, Rows, const Matrix*, int, float*, int, const MaskTicket*, const SamplingInputs*);
    void (*score)(Program*, Rows, const Matrix*, int, float*, int, const Scores*);
    int (*run)(Program*, int, int, int);
    int (*profile)(Program*, int, int, int, double*);
    int (*size)(const Program*);

   private:
    template <class Function>
    void find(Function& function, const char* name) {
        function = reinterpret_cast<Function>(dlsym(handle, name));
        if (!function) fail(std::string("the library has no function ") + name);
    }

    void* const handle;
};

// The same numbers on every machine: splitmix64 (Steele, Lea and Flood, 2014), and exact arithmetic on its bits.
class Random {
   public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t next() {
        uint64_t z = state_ += 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }
    int below(int limit) { return int(next() % uint64_t(limit)); }
    // In [-scale, scale), with 20 bits.
    float number(float scale) { return float(below(1 << 20) - (1 << 19)) * (scale / float(1 << 19)); }

   private:
    uint64_t state_;
};

struct Config {
    const char* name;
    Format weights, head;
    bool bytes;  // 8-bit activations before 4-bit weights
    int hidden, inner, num_heads, num_kv_heads, head_dim;
    int window;       // of the second layer; 0 for none
    bool has_extras;  // biases, and norms of heads
};

constexpr int VOCAB = 1003, NUM_LAYERS = 2, MAX_TOKENS = 256, MAX_ROWS = 16, MAX_BLOCKS = 16, NUM_BLOCKS = 128;
constexpr int NUM_SWAP_BLOCKS = 4, MAX_LENGTH = MAX_BLOCKS * BLOCK, MAX_TOP = 8;
constexpr float EPS = 1e-5f;

class Model {
   public:
    Model(const Library& library, ThreadPool* pool, const Config& config, const SamplingInputs& inputs,
          const Scores& scores, const int64_t* scored)
        : library(library), pool(pool), config(config), random_(uint64_t(config.hidden) * 64 + uint64_t(config.inner)) {
        step = {0, 0, 0, memory<int64_t>(MAX_TOKENS), memory<int64_t>(MAX_TOKENS), memory<int64_t>(MAX_TOKENS),
                memory<int64_t>(MAX_ROWS), memory<int32_t>(MAX_ROWS), memory<int32_t>(MAX_ROWS),
                memory<int32_t>(MAX_ROWS), memory<int32_t>(MAX_ROWS * MAX_BLOCKS), MAX_BLOCKS, nullptr, nullptr};
        residual = memory<float>(size_t(MAX_TOKENS) * config.hidden);
        wide = memory<float>(size_t(MAX_TOKENS) * widest());
        logits = memory<float>(size_t(MAX_ROWS) * VOCAB);
        normed = rows(config.hidden);
        queries = rows(config.num_heads * config.head_dim);
        attended = rows(config.num_heads * config.head_dim);
        gated = rows(config.inner);
        record(inputs, scores, scored);
    }
    ~Model() {
        library.program_delete(program);
        library.program_delete(scoring);
    }
    Model(const Model&) = delete;

    template <class T>
    T* memory(size_t count) {
        kept_.push_back(std::make_unique<uint64_t[]>((count * sizeof(T) + 64) / 8 + 1));
        const auto address = reinterpret_cast<uintptr_t>(kept_.back().get());
        return reinterpret_cast<T*>((address + 63) / 64 * 64);
    }

    // Of a KV block.
    size_t layer_bytes() const { return layer_kv(nullptr, 0).block_bytes(); }
    KV layer_kv(uint8_t* memory, size_t stride) const {
        return {memory, config.num_kv_heads, config.head_dim, kv_type(), nullptr, nullptr, stride};
    }
    KVType kv_type() const { return config.has_extras ? KVType::INT8 : KVType::BF16; }
    int widest() const { return std::max({config.hidden, config.inner, config.num_heads * config.head_dim}); }

    const Library& library;
    ThreadPool* const pool;
    const Config config;
    Step step;
    Program *program = nullptr, *scoring = nullptr;
    float *residual, *wide, *logits;
    Rows normed, queries, attended, gated;
    KV kv[NUM_LAYERS];
    MaskTicket ticket{nullptr, 0, 0};

   private:
    void record(const SamplingInputs& inputs, const Scores& scores, const int64_t* scored) {
        const auto& c = config;
        const int heads = c.num_heads + 2 * c.num_kv_heads, width = c.num_heads * c.head_dim;
        const ActivationForm form = form_of(c.weights), head_form = form_of(c.head);
        const bool floats = form != ActivationForm::PLAIN;
        program = library.program_new(pool, &step);
        const Matrix* table = matrix(c.head, VOCAB, c.hidden, false);
        library.embed(program, residual, table, 1.0f, nullptr);
        const float *cos = numbers(size_t(MAX_LENGTH) * c.head_dim / 2, 0, 1);
        const float *sin = numbers(size_t(MAX_LENGTH) * c.head_dim / 2, 0, 1);
        for (int layer = 0; layer < NUM_LAYERS; layer++) {
            kv[layer] = layer_kv(memory<uint8_t>(NUM_BLOCKS * layer_bytes()), layer_bytes());
            library.norm(program, normed, int(form), residual, numbers(c.hidden, 1, 0.3f), c.hidden, EPS, 0);
            const HeadNorms norms{numbers(c.head_dim, 1, 0.3f), numbers(c.head_dim, 1, 0.3f), EPS};
            const Product qkv{*matrix(c.weights, heads * c.head_dim, c.hidden, c.has_extras), normed};
            library.qkv(program, queries, &qkv, 1, c.num_heads, &kv[layer], cos, sin, c.has_extras ? &norms : nullptr, nullptr,
                        nullptr);
            const AttentionPlan* plan =
                library.attention_plan(program, c.num_heads, c.num_kv_heads, layer ? c.window : 0);
            const Rows out = floats ? Rows{reinterpret_cast<uint8_t*>(wide), size_t(width) * 4} : attended;
            library.attention(program, out, floats, queries, &kv[layer], plan, nullptr);
            if (floats) library.quantize(program, attended, int(form), wide, width);
            library.linear_add(program, residual, attended, matrix(c.weights, c.hidden, width, c.has_extras), c.hidden, 1.0f);
            library.norm(program, normed, int(form), residual, numbers(c.hidden, 1, 0.3f), c.hidden, EPS, 0);
            const Rows gates = floats ? Rows{reinterpret_cast<uint8_t*>(wide), size_t(c.inner) * 4} : gated;
            const Product gate_up{*matrix(c.weights, 2 * c.inner, c.hidden, false), normed};
            library.swiglu(program, gates, floats, &gate_up, 1, int(Activation::SILU));
            if (floats) library.quantize(program, gated, int(form), wide, c.inner);
            library.linear_add(program, residual, gated, matrix(c.weights, c.hidden, c.inner, false), c.hidden, 1.0f);
        }
        const float* last_norm = numbers(c.hidden, 1, 0.3f);
        library.norm(program, normed, int(head_form), residual, last_norm, c.hidden, EPS, 1);
        library.sample(program, normed, table, VOCAB, logits, MAX_ROWS, &ticket, &inputs);
        Step scored_step = step;
        scored_step.sampled = scored;
        scoring = library.program_new(pool, &scored_step);
        library.norm(scoring, normed, int(head_form), residual, last_norm, c.hidden, EPS, 1);
        library.score(scoring, normed, table, VOCAB, logits, MAX_ROWS, &scores);
    }

    ActivationForm form_of(Format format) const {
        if (format == Format::BF16) return ActivationForm::PLAIN;
        if (format == Format::Q8_0) return ActivationForm::WORDS;
        return config.bytes ? ActivationForm::BYTES : ActivationForm::SPLIT;
    }

    Rows rows(int width) {
        size_t stride = 0;
        for (int form = 0; form < 4; form++) stride = std::max(stride, library.activation_bytes(form, width));
        return {memory<uint8_t>(stride * library.activation_rows(MAX_TOKENS)), stride};
    }

    const float* numbers(size_t count, float middle, float scale) {
        float* to = memory<float>(count);
        for (size_t i = 0; i < count; i++) to[i] = middle + random_.number(scale);
        return to;
    }

    // Random rows as checkpoints have them (pack.h), packed; padding columns are null.
    const Matrix* matrix(Format format, int columns, int depth, bool has_bias) {
        const int padded = (columns + PANEL - 1) / PANEL * PANEL;
        Matrix* made = memory<Matrix>(1);
        const float* bias = has_bias ? numbers(padded, 0, 0.2f) : nullptr;
        *made = {format, form_of(format), padded, depth, nullptr, bias, nullptr};
        // About 1 / sqrt(depth), so that the numbers of a deep model neither grow nor vanish.
        float scale = 2.0f;
        for (int d = depth; d > 1; d /= 4) scale *= 0.5f;
        const int block = file_block(format).bytes, groups = block_groups(format);
        const size_t bytes = format == Format::BF16 ? size_t(depth) * 2 : size_t(depth) / GROUP / groups * block;
        std::vector<const uint8_t*> rows(padded, nullptr);
        for (int column = 0; column < columns; column++) {
            uint8_t* row = memory<uint8_t>(bytes);
            rows[column] = row;
            if (format == Format::BF16) {
                for (int k = 0; k < depth; k++) put<uint16_t>(row + 2 * k, to_bf16(random_.number(2 * scale)));
                continue;
            }
            for (size_t i = 0; i < bytes; i++) row[i] = uint8_t(random_.next());
            // The middle of codes, where there are minimums; scales within a block reach 63, those of q6_k 127.
            const float middle = (1 << code_bits(format)) / 2 - 0.5f;
            const float step = 2 * scale / middle / (format == Format::Q6_K ? 127 : groups > 1 ? 63 : 1);
            for (size_t at = 0; at < bytes; at += block) {
                const float of_block = step * (0.75f + random_.number(0.25f));
                put(row + at + (format == Format::Q6_K ? 208 : 0), to_f16(of_block));
                if (!has_minimums(format)) continue;
                const float minimum = groups > 1 ? middle * of_block : -middle * of_block;
                put(row + at + 2, to_f16(minimum + random_.number(0.05f) * minimum));
            }
        }
        uint8_t* panels = memory<uint8_t>(library.panel_bytes(made) * size_t(padded) / PANEL);
        library.pack(pool, made, panels, rows.data());
        made->panels = panels;
        return made;
    }

    template <class T>
    static void put(uint8_t* at, T value) {
        memcpy(at, &value, sizeof value);
    }

    // Cut off, subnormals included; below 2.
    static uint16_t to_f16(float value) {
        const uint16_t sign = value < 0 ? 0x8000 : 0;
        const float magnitude = std::fabs(value) * 16777216.0f;  // in units of the smallest subnormal, 2^-24
        uint32_t whole = uint32_t(magnitude), exponent = 0;
        for (; whole >= 2048; whole /= 2) exponent++;
        return whole < 1024 ? uint16_t(sign | whole) : uint16_t(sign | (exponent + 1) << 10 | (whole - 1024));
    }

    Random random_;
    std::vector<std::unique_ptr<uint64_t[]>> kept_;
};

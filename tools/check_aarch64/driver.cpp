// Runs whole steps of tiny models through the library's C interface, and writes what they compute to a file:
//
//     driver LIBRARY THREADS FILE
//
// Two files from libraries of different machines or levels, or with different numbers of threads, can be compared
// (compare.py). A file is a list of arrays: the length of a name, the name, a type (f float32, h bfloat16, i int32,
// b bytes), the number of bytes, the bytes. The driver also checks, on its own, what must hold on any machine, and
// exits with 1 if it does not.
#include <atomic>
#include <chrono>
#include <thread>

#include "model.h"

namespace {

// The arrays that a step's samples share; `Model` records their addresses.
struct Samples {
    uint8_t greedy[MAX_ROWS] = {};
    float temperature[MAX_ROWS] = {}, top_p[MAX_ROWS] = {}, min_p[MAX_ROWS] = {};
    int32_t top_k[MAX_ROWS] = {};
    uint64_t keys[MAX_ROWS] = {};
    const LogitsProcessors* logits_processors[MAX_ROWS] = {};
    int32_t num_known[MAX_ROWS] = {}, ids[MAX_ROWS] = {}, num_top[MAX_ROWS] = {};
    const uint32_t* masks[MAX_ROWS] = {};
    uint8_t* logprobs[MAX_ROWS] = {};
    const int32_t* given_ids[MAX_ROWS] = {};

    SamplingInputs inputs() {
        return {greedy,    temperature, top_p,   min_p,    top_k,   keys, logits_processors,
                num_known, masks,       ids,     num_top, logprobs, given_ids};
    }
};

struct Sequence {
    std::vector<int32_t> ids;  // prompt, then output
    std::vector<int32_t> blocks;
    int num_prompt = 0, num_computed = 0;
};

// A part of a step: `count` tokens of a sequence.
struct Entry {
    int sequence, count;
};

constexpr int MASK_WORDS = (VOCAB + 31) / 32;

class Driver {
   public:
    Driver(const Library& library, ThreadPool* pool, const Config& config, FILE* file)
        : file_(file), random_(7), scores_{score_ids_, score_num_top_, score_out_},
          model_(library, pool, config, samples_.inputs(), scores_, scored_) {
        for (int row = 0; row < MAX_ROWS; row++) {
            score_out_[row] = logprobs_[row];
            for (uint32_t& word : masks_[row]) word = uint32_t(random_.next() & random_.next());
            masks_[row][3] = ~0u;
            for (int32_t& id : given_[row]) id = random_.below(VOCAB);
        }
        for (uint32_t& word : allowed_) word = uint32_t(random_.next() | random_.next());
        for (int i = 0; i < 8; i++) bias_ids_[i] = random_.below(VOCAB), bias_values_[i] = random_.number(4);
        for (int i = 0; i < NUM_BLOCKS; i++) free_.push_back(i);
        for (int i = NUM_BLOCKS - 1; i > 0; i--) std::swap(free_[i], free_[random_.below(i + 1)]);
    }

    void run() {
        for (const int length : {70, 17, 1, 33, 130, 66}) add(length);
        step("prefill", {{0, 70}, {1, 17}, {2, 1}, {3, 33}});
        step("chunk", {{4, 30}, {0, 1}, {1, 1}, {2, 1}, {3, 1}});
        step("rest of a prompt", {{5, 66}, {4, 100}});
        score("prompt logprobs");
        check_chunks();
        // Four that begin like sequence 4, in its blocks, and one like sequence 0.
        for (int i = 0; i < 4; i++) fork(4, 128, 1 + i);
        fork(0, 64, 3);
        step("shared prefixes", {{7, 1}, {8, 2}, {0, 1}, {9, 3}, {4, 1}, {10, 4}, {11, 3}, {1, 1}});
        // Each number of rows takes another path through the matmuls.
        for (int rows = 1; rows <= 12; rows++) {
            std::vector<Entry> entries;
            for (int i = 0; i < rows; i++) entries.push_back({i, 1});
            step("decode " + std::to_string(rows), entries);
        }
        check_late_masks();
        swap();
        for (int layer = 0; layer < NUM_LAYERS; layer++)
            write("keys and values of layer " + std::to_string(layer),
                  model_.kv_type() == KVType::INT8 ? 'b' : 'h', model_.kv[layer].data,
                  NUM_BLOCKS * model_.layer_bytes());
    }

   private:
    void add(int length) {
        Sequence& made = sequences_.emplace_back();
        for (int i = 0; i < length; i++) made.ids.push_back(random_.below(VOCAB));
        made.num_prompt = length;
    }

    // A sequence with the first `num_shared` tokens of another, a whole number of blocks, and some of its own.
    void fork(int parent, int num_shared, int num_own) {
        add(num_own);
        Sequence& made = sequences_.back();
        const Sequence& from = sequences_[parent];
        made.ids.insert(made.ids.begin(), from.ids.begin(), from.ids.begin() + num_shared);
        made.blocks.assign(from.blocks.begin(), from.blocks.begin() + num_shared / BLOCK);
        made.num_prompt += num_shared;
        made.num_computed = num_shared;
    }

    template <class T>
    static T* writable(const T* array) {
        return const_cast<T*>(array);
    }

    // Fills the step's arrays. An entry is sampled if it ends with its sequence's last token.
    void fill(const std::vector<Entry>& entries) {
        Step& step = model_.step;
        num_tokens_ = num_samples_ = 0;
        for (size_t i = 0; i < entries.size(); i++) {
            Sequence& sequence = sequences_[entries[i].sequence];
            const int start = sequence.num_computed, end = start + entries[i].count;
            while (int(sequence.blocks.size()) * BLOCK < end) {
                sequence.blocks.push_back(free_.back());
                free_.pop_back();
            }
            writable(step.starts)[i] = start, writable(step.counts)[i] = entries[i].count;
            writable(step.offsets)[i] = num_tokens_;
            std::copy(sequence.blocks.begin(), sequence.blocks.end(), writable(step.block_tables) + i * MAX_BLOCKS);
            for (int at = start; at < end; at++, num_tokens_++) {
                writable(step.ids)[num_tokens_] = sequence.ids[at];
                writable(step.positions)[num_tokens_] = at;
                writable(step.slots)[num_tokens_] = int64_t(sequence.blocks[at / BLOCK]) * BLOCK + at % BLOCK;
            }
            if (end < int(sequence.ids.size())) continue;
            sampled_[num_samples_] = entries[i].sequence;
            writable(step.sampled)[num_samples_++] = num_tokens_ - 1;
        }
        num_rows_ = int(entries.size());
    }

    // Every kind of sampling, by the number of the sequence; greedy rows also without storing logits if `stores` is not
    // set.
    void choose(bool stores) {
        for (int i = 0; i < num_samples_; i++) {
            const Sequence& sequence = sequences_[sampled_[i]];
            const int kind = stores ? sampled_[i] % 8 : 0;
            samples_.greedy[i] = !stores;
            samples_.temperature[i] = kind == 0 || kind == 7 ? 0.0f : kind == 2 ? 0.7f : 1.0f;
            samples_.top_k[i] = kind == 2 || kind == 4 ? 40 : 0;
            samples_.top_p[i] = kind == 3 || kind == 4 ? 0.9f : 1.0f;
            samples_.min_p[i] = kind == 4 ? 0.05f : 0.0f;
            samples_.keys[i] = random_.next();
            samples_.num_known[i] = int32_t(sequence.ids.size());
            samples_.masks[i] = kind == 6 ? masks_[i] : nullptr;
            samples_.logprobs[i] = kind >= 5 ? logprobs_[i] : nullptr;
            samples_.num_top[i] = kind >= 5 ? 1 + kind - 5 : 0;
            samples_.given_ids[i] = kind == 7 ? given_[i] : nullptr;
            processors_[i] = {1.2f, 0.3f, 0.1f, sequence.num_prompt, sequence.ids.data(), allowed_, bias_ids_,
                              bias_values_, enders_, runs_, 8, 3, 5, 2};
            samples_.logits_processors[i] = kind == 5 ? &processors_[i] : nullptr;
            std::fill_n(reinterpret_cast<float*>(logprobs_[i]), LOGPROB_BYTES / 4, 0.0f);
        }
    }

    int compute() { return model_.library.run(model_.program, num_tokens_, num_rows_, num_samples_); }

    // Computes a step twice: with greedy rows, then with each row's own sampling, whose ids go on in the sequences.
    void step(const std::string& name, const std::vector<Entry>& entries) {
        fill(entries);
        choose(false);
        require(compute() == 0, name + " has no status");
        const std::vector<int32_t> greedy(samples_.ids, samples_.ids + num_samples_);
        choose(true);
        // Masks may arrive while the step runs.
        word_.store(0);
        model_.ticket = {reinterpret_cast<const uint32_t*>(&word_), ++ticket_, 60'000};
        std::thread writer([this] { word_.store(ticket_); });
        require(compute() == 0, name + " has no status");
        writer.join();
        model_.ticket.word = nullptr;
        const Config& c = model_.config;
        write(name + ": residual", 'f', model_.residual, size_t(num_tokens_) * c.hidden * 4);
        write_rows(name + ": queries", model_.queries, num_tokens_, Format::BF16, c.num_heads * c.head_dim);
        write(name + ": logits", 'f', model_.logits, size_t(num_samples_) * VOCAB * 4);
        write(name + ": greedy ids", 'i', greedy.data(), size_t(num_samples_) * 4);
        write(name + ": ids", 'i', samples_.ids, size_t(num_samples_) * 4);
        write_rows(name + ": normed", model_.normed, num_samples_, c.head, c.hidden);
        write_rows(name + ": attended", model_.attended, num_tokens_, c.weights, c.num_heads * c.head_dim);
        write_rows(name + ": gated", model_.gated, num_tokens_, c.weights, c.inner);
        for (int i = 0; i < num_samples_; i++) {
            check_row(name, i, greedy[i]);
            if (samples_.logprobs[i])
                write(name + ": logprobs of sample " + std::to_string(i), 'b', logprobs_[i], LOGPROB_BYTES);
            sequences_[sampled_[i]].ids.push_back(samples_.ids[i]);
        }
        for (const Entry& entry : entries) sequences_[entry.sequence].num_computed += entry.count;
    }

    // Codes are integers, but a last bit of the norm before them can move one: floats are compared as the others.
    void write_rows(const std::string& name, const Rows& rows, int count, Format format, int width) {
        const bool plain = format == Format::BF16, bytes = model_.config.bytes && format != Format::Q8_0;
        const size_t size = plain ? size_t(width) * model_.library.act_bytes() : size_t(width) * (bytes ? 1 : 2);
        const size_t scales = plain ? 0 : size_t(width) / GROUP * 4;
        std::vector<uint8_t> codes, factors;
        for (int row = 0; row < count; row++) {
            const uint8_t* from = rows.data + row * rows.stride;
            codes.insert(codes.end(), from, from + size);
            factors.insert(factors.end(), from + size, from + size + scales);
        }
        write(name, plain ? (size == size_t(width) * 4 ? 'f' : 'h') : 'b', codes.data(), codes.size());
        if (scales) write(name + " scales", 'f', factors.data(), factors.size());
    }

    void check_row(const std::string& name, int i, int32_t greedy) {
        const float* logits = model_.logits + size_t(i) * VOCAB;
        const int32_t id = samples_.ids[i];
        const std::string row = name + ", sample " + std::to_string(i);
        require(id >= 0 && id < VOCAB, row + ": the id is in the vocabulary");
        for (int v = 0; v < VOCAB; v++) require(!std::isnan(logits[v]), row + ": logits are numbers");
        const int kind = sampled_[i] % 8;
        if (kind != 5 && kind != 6) {
            const float* top = std::max_element(logits, logits + VOCAB);
            require(top - logits == greedy, row + ": the greedy id has the largest logit");
        }
        if (kind == 0 || kind == 7) require(id == greedy, row + ": temperature 0 is greedy");
        if (kind == 5) require(allowed_[id / 32] >> id % 32 & 1, row + ": the id is allowed");
        if (kind == 6) require(masks_[i][id / 32] >> id % 32 & 1, row + ": the mask allows the id");
    }

    // A prompt's logits are the same in one chunk as in two.
    void check_chunks() {
        const std::vector<float> in_two(model_.logits + VOCAB, model_.logits + 2 * VOCAB);
        add(0);
        Sequence& made = sequences_.back();
        made.ids.assign(sequences_[4].ids.begin(), sequences_[4].ids.begin() + 130);
        made.num_prompt = 130;
        step("whole prompt", {{6, 130}});
        // Again without the mask, which changes logits.
        made.ids.pop_back();
        made.num_computed = 129;
        fill({{6, 1}});
        choose(true);
        samples_.masks[0] = nullptr;
        require(compute() == 0, "one token again");
        require(!memcmp(model_.logits, in_two.data(), VOCAB * 4), "logits do not depend on chunks and neighbours");
        made.num_computed = 130;
        made.ids.push_back(samples_.ids[0]);
    }

    // A step whose masks do not arrive ends with status 1, and the next one is not disturbed.
    void check_late_masks() {
        fill({{0, 1}});
        choose(false);
        word_.store(0);
        model_.ticket = {reinterpret_cast<const uint32_t*>(&word_), ++ticket_, 1};
        require(compute() == 1, "masks that never arrive end the step with status 1");
        model_.ticket.word = nullptr;
        require(compute() == 0, "the step after has no status");
    }

    // The logprobs of all ids of the last step's first tokens.
    void score(const std::string& name) {
        const int count = MAX_ROWS;
        for (int i = 0; i < count; i++) {
            scored_[i] = i * 3;
            score_ids_[i] = random_.below(VOCAB);
            score_num_top_[i] = i % (MAX_TOP + 1);
            std::fill_n(reinterpret_cast<float*>(logprobs_[i]), LOGPROB_BYTES / 4, 0.0f);
        }
        // The last step left its logits here for `check_chunks`.
        const std::vector<float> before(model_.logits, model_.logits + 2 * VOCAB);
        require(model_.library.run(model_.scoring, num_tokens_, 0, count) == 0, name + " has no status");
        write(name + ": logits", 'f', model_.logits, size_t(count) * VOCAB * 4);
        for (int i = 0; i < count; i++) {
            float logprob;
            memcpy(&logprob, logprobs_[i], 4);
            require(logprob <= 0 && logprob > -50, name + ": a logprob is plausible");
        }
        write(name, 'b', logprobs_, sizeof logprobs_);
        std::copy(before.begin(), before.end(), model_.logits);
    }

    // Blocks go to swap space, come back elsewhere, and are copied in a chain.
    void swap() {
        uint8_t* layers[NUM_LAYERS];
        for (int i = 0; i < NUM_LAYERS; i++) layers[i] = model_.kv[i].data;
        const size_t bytes = model_.layer_bytes();
        std::vector<uint8_t> space(NUM_SWAP_BLOCKS * NUM_LAYERS * bytes);
        const Blocks blocks{layers, space.data(), NUM_LAYERS, NUM_BLOCKS, bytes};
        const auto& own = sequences_[4].blocks;
        const int32_t a = own[0], b = own[1], c = own[2], d = free_.back();
        const int32_t sources[] = {a, b, NUM_BLOCKS + 1, c, d}, targets[] = {NUM_BLOCKS, NUM_BLOCKS + 1, c, d, a};
        const std::vector<uint8_t> second(layers[1] + b * bytes, layers[1] + (b + 1) * bytes);
        model_.library.copy_blocks(model_.pool, &blocks, sources, targets, 5);
        for (const int32_t block : {c, d, a})
            require(!memcmp(layers[1] + block * bytes, second.data(), bytes), "copies are made in their order");
        write("swap space", 'b', space.data(), space.size());
    }

    void require(bool holds, const std::string& what) const {
        if (!holds) Library::fail(std::string(model_.config.name) + ": this does not hold: " + what);
    }

    void write(const std::string& name, char type, const void* data, uint64_t num_bytes) {
        const std::string full = std::string(model_.config.name) + ": " + name;
        const uint32_t length = uint32_t(full.size());
        const bool written = fwrite(&length, 4, 1, file_) == 1 && fwrite(full.data(), length, 1, file_) == 1 &&
                             fwrite(&type, 1, 1, file_) == 1 && fwrite(&num_bytes, 8, 1, file_) == 1 &&
                             (!num_bytes || fwrite(data, num_bytes, 1, file_) == 1);
        require(written, "the file can be written");
    }

    static constexpr size_t LOGPROB_BYTES = 4 + 8 * MAX_TOP;

    FILE* const file_;
    Random random_;
    Samples samples_;
    int64_t scored_[MAX_ROWS] = {};
    int32_t score_ids_[MAX_ROWS] = {}, score_num_top_[MAX_ROWS] = {};
    uint8_t* score_out_[MAX_ROWS] = {};
    alignas(4) uint8_t logprobs_[MAX_ROWS][LOGPROB_BYTES] = {};
    uint32_t masks_[MAX_ROWS][MASK_WORDS] = {}, allowed_[MASK_WORDS] = {};
    int32_t given_[MAX_ROWS][MAX_TOP] = {}, bias_ids_[8] = {};
    float bias_values_[8] = {};
    const int32_t enders_[3] = {1, 500, VOCAB - 1};
    const int32_t runs_[6] = {1, 77, 2, 5, 6, 0};
    LogitsProcessors processors_[MAX_ROWS] = {};
    Scores scores_;
    std::vector<Sequence> sequences_;
    std::vector<int32_t> free_;
    int num_tokens_ = 0, num_rows_ = 0, num_samples_ = 0, sampled_[MAX_ROWS] = {};
    std::atomic<uint32_t> word_{0};
    uint32_t ticket_ = 0;
    Model model_;
};

// Shapes with and without windows, biases and norms of heads; widths that are no multiple of 64.
constexpr Config CONFIGS[] = {
    {"bf16", Format::BF16, Format::BF16, false, 96, 160, 4, 2, 32, 0, false},
    {"bf16, window", Format::BF16, Format::BF16, false, 128, 192, 6, 2, 64, 40, true},
    {"q8_0", Format::Q8_0, Format::Q8_0, false, 128, 192, 6, 3, 32, 40, true},
    {"q4_0, 12-bit activations", Format::Q4_0, Format::Q8_0, false, 96, 160, 3, 1, 64, 0, true},
    {"q4_1, 12-bit activations", Format::Q4_1, Format::Q8_0, false, 128, 192, 4, 2, 32, 70, false},
    {"q4_0, 8-bit activations", Format::Q4_0, Format::Q8_0, true, 96, 160, 3, 1, 64, 0, true},
    {"q4_1, 8-bit activations", Format::Q4_1, Format::Q8_0, true, 128, 192, 4, 2, 32, 70, false},
    {"q5_0 and q4_k, 12-bit activations", Format::Q5_0, Format::Q4_K, false, 256, 160, 4, 2, 32, 0, false},
    {"q5_k and q6_k, 12-bit activations", Format::Q5_K, Format::Q6_K, false, 256, 256, 4, 2, 64, 40, true},
    {"q6_k and q5_k, 8-bit activations", Format::Q6_K, Format::Q5_K, true, 256, 256, 4, 2, 64, 40, true},
};

}  // namespace

int main(int argc, char** argv) {
    // Of the models, one of EVERY is computed.
    const int every = argc == 5 ? atoi(argv[4]) : 1;
    if (argc < 4 || argc > 5 || atoi(argv[2]) < 1 || every < 1)
        Library::fail("usage: driver LIBRARY THREADS FILE [EVERY]");
    const Library library(argv[1]);
    FILE* file = fopen(argv[3], "wb");
    if (!file) Library::fail(std::string("can't write ") + argv[3]);
    ThreadPool* pool = library.thread_pool_new(atoi(argv[2]), 200);
    for (size_t i = 0; i < std::size(CONFIGS); i += every) Driver(library, pool, CONFIGS[i], file).run();
    library.thread_pool_delete(pool);
    if (fclose(file)) Library::fail(std::string("can't write ") + argv[3]);
    printf("interface %d, %zu models\n", library.abi_version(), std::size(CONFIGS));
}

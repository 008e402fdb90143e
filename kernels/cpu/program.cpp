// The library's whole interface: C functions, which Python calls with ctypes, without the GIL. Most of them record an op
// of a program (program.h).
//
// Memory in arguments belongs to the caller and must outlive the program. Sizes are run-time values: one library serves
// every model.
#include "attention.h"
#include "copy.h"
#include "delta.h"
#include "embed.h"
#include "experts.h"
#include "linear.h"
#include "lora.h"
#include "mapped_file.h"
#include "norm.h"
#include "pack.h"
#include "patches.h"
#include "program.h"
#include "qkv.h"
#include "ranks.h"
#include "sampler.h"
#include "short_conv.h"
#include "step.h"
#include "step_board.h"
#include "thread_pool.h"
#include "token_inputs.h"

extern "C" {

int abi_version() { return 35; }

// Asks the system for what these instructions need. Whether they can be used.
int prepare() {
#if defined(AMX)
    return request_tiles();
#else
    return 1;
#endif
}

// --- threads

ThreadPool* thread_pool_new(int size, int spins) { return new ThreadPool(size, spins); }
void thread_pool_delete(ThreadPool* thread_pool) { delete thread_pool; }

// --- weights

size_t panel_bytes(const Matrix* matrix) { return matrix->panel_bytes(); }

// Output n is the row at rows[n] (pack.h says how rows lie there), or zeros where that is null.
void pack(ThreadPool* thread_pool, const Matrix* matrix, uint8_t* panels, const uint8_t* const* rows) {
    thread_pool->each(matrix->columns / PANEL, [=](int panel) { pack_panel(*matrix, panels, rows, panel); });
}

// The same for a bf16 matrix from rows of other floats; `source` is a Source.
void pack_floats(ThreadPool* thread_pool, const Matrix* matrix, uint8_t* panels, const uint8_t* const* rows, int source) {
    thread_pool->each(matrix->columns / PANEL,
                      [=](int panel) { pack_float_panel(*matrix, panels, rows, Source(source), panel); });
}

// A file in memory, read only, at a multiple of 2 MiB so that its pages can be huge ones. Null if the system refuses.
void* map_file(ThreadPool* thread_pool, int fd, size_t bytes) { return mapped_file(*thread_pool, fd, bytes); }
void unmap_file(void* memory, size_t bytes) { munmap(memory, bytes); }

// Copies the file's first `bytes` to memory. Whether all of them could be read.
int copy_file(ThreadPool* thread_pool, int fd, uint8_t* memory, size_t bytes) {
    return read_file(*thread_pool, fd, memory, bytes);
}

// `stopped` is an int that may become 1 meanwhile. Returns 0, or errno.
int write_file(int fd, const Extent* extents, int count, size_t piece, const int* stopped) {
    static_assert(sizeof(std::atomic<int>) == sizeof(int));
    return write_extents(fd, extents, count, piece, reinterpret_cast<const std::atomic<int>*>(stopped));
}

// Touches each page of `bytes` of new memory, which the system fills with zeros then.
void touch(ThreadPool* thread_pool, uint8_t* memory, size_t bytes) {
    constexpr size_t part = 2 << 20, page = 4096;
    thread_pool->each(int((bytes + part - 1) / part), [=](int i) {
        for (size_t place = i * part; place < std::min((i + 1) * part, bytes); place += page)
            *static_cast<volatile uint8_t*>(memory + place) = 0;
    });
}

// Touches each page of these extents, `piece` bytes of each at once, so that their first bytes come first. Steps may use
// them meanwhile: no byte changes. `stopped` is an int that may become 1. A thread of the lowest priority does it.
void touch_later(const Extent* extents, int count, size_t piece, const int* stopped) {
    touch_extents(extents, count, piece, reinterpret_cast<const std::atomic<int>*>(stopped));
}

// --- KV memory

void copy_blocks(ThreadPool* thread_pool, const Blocks* blocks, const int32_t* sources, const int32_t* targets, int count) {
    copy_blocks_of(*thread_pool, *blocks, sources, targets, count);
}

// --- activations

int act_bytes() { return sizeof(act); }
int prefers_blocks() { return PREFERS_BLOCKS; }

size_t activation_bytes(int form, int width) { return row_bytes(ActivationForm(form), width); }
int activation_rows(int rows) { return padded_rows(rows); }

// --- recording

Program* program_new(ThreadPool* thread_pool, const Step* step) { return new Program(*thread_pool, *step); }
void program_delete(Program* program) { delete program; }

// With a part of the vocabulary, `table` has the rows of its ids, and other ranks compute the tokens with other ids.
// `encoded` are the rows of the encoder cache, `stride` numbers apart, or null.
void program_embed(Program* program, float* residual, const Matrix* table, float scale, const float* encoded, int stride) {
    program->add<Embed>(residual, *table, scale, encoded, stride, program->vocab.first, program->vocab.end());
}

// Adds `width` numbers of the rows of the encoder cache, from `encoded` on.
void program_add_encoded(Program* program, float* residual, int width, const float* encoded, int stride) {
    program->add<AddEncoded>(residual, width, encoded, stride);
}

void program_positions(Program* program, float* residual, const Matrix* table, int offset, const int64_t* rows) {
    program->add<AddPositions>(residual, *table, offset, rows, program->vocab.first, program->vocab.end());
}

// The pixels of patches as the activations of the matmul behind it.
void program_patches(Program* program, Rows out, const uint8_t* pixels, int width) {
    program->add<Patches>(out, pixels, width);
}

void program_norm(Program* program, Rows out, int form, const float* residual, const float* weight, int width,
                  float eps, int sampled) {
    program->add<Norm>(out, ActivationForm(form), residual, weight, width, eps, sampled != 0);
}

void program_any_norm(Program* program, Rows out, int form, const float* residual, const NormWeights* norm, int width,
                      int sampled) {
    program->add<AnyNorm>(out, ActivationForm(form), residual, *norm, width, sampled != 0);
}

// `from` may be null: then the residual itself is normalized.
void program_add_norm(Program* program, float* residual, const float* from, const NormWeights* norm, int width,
                      float factor, float scale) {
    const Ranks* const ranks = program->vocab.ranks;  // they share out the tokens
    const RowShare share = ranks ? RowShare{ranks->rank, ranks->num} : RowShare{};
    program->add<AddNorm>(residual, from, *norm, width, factor, scale, share);
}

// `inputs` [tokens][layers * size] are projections of embeddings, and become the inputs of layers.
void program_token_inputs(Program* program, float* inputs, const FileTable* table, const NormWeights* norm, int size,
                          int layers) {
    program->add<TokenInputs>(inputs, *table, *norm, size, layers);
}

void program_gate_inputs(Program* program, Rows out, int form, const float* gates, const float* inputs, int size,
                         int stride, int activation) {
    program->add<GateInputs>(out, ActivationForm(form), gates, inputs, size, stride, Activation(activation));
}

void program_quantize(Program* program, Rows out, int form, const float* from, int width) {
    program->add<Quantize>(out, ActivationForm(form), from, width);
}

void program_gate(Program* program, Rows out, int form, float* from, const float* gates, int width, int first, int all,
                  int columns, int softplus) {
    program->add<Gate>(out, ActivationForm(form), from, gates, width, first, all, columns, softplus != 0);
}

// `norms` and `form` may be null. `values`, for norms of all heads, has room for the matmul's results; else it is null.
void program_qkv(Program* program, Rows queries, const Product* products, int num_products, int num_heads, const KV* kv,
                 const float* cos, const float* sin, const HeadNorms* norms, const QueryOptions* form, float* values) {
    const QkvWriter writer(queries, num_heads, *kv, cos, sin, norms ? *norms : HeadNorms{}, form);
    if (!values) {
        program->add<Qkv>(writer, products, num_products);
        return;
    }
    const int width = (num_heads + 2 * kv->heads) * kv->head_dim;
    program->add<Linear>(values, products, num_products, width, width);
    program->add<QkvRows>(writer, values, HeadShare{num_heads, kv->heads});
}

// The second half of the above, from `values` that all ranks have written.
void program_qkv_rows(Program* program, Rows queries, int num_heads, const KV* kv, const float* cos, const float* sin,
                      const HeadNorms* norms, const QueryOptions* form, float* values, const HeadShare* share) {
    program->add<QkvRows>(QkvWriter(queries, num_heads, *kv, cos, sin, *norms, form), values, *share);
}

// The ops that are recorded from now on read these tables, of a KV group, in place of those in `program_new`; or other
// entries of the same tokens, whose number is at `rows` when the program runs.
void program_use_tables(Program* program, const int64_t* slots, const int32_t* tables) { program->use(slots, tables); }
void program_use_entries(Program* program, const Step* step, const int32_t* rows) { program->use_entries(*step, rows); }

AttentionPlan* program_attention_plan(Program* program, int num_heads, int num_kv_heads, int window, int window_after) {
    return &program->add<AttentionPlan>(num_heads, num_kv_heads, program->thread_pool().size(), window, window_after);
}

void program_attention(Program* program, Rows out, int floats, Rows queries, const KV* kv,
                       const AttentionPlan* plan, const ScoreOptions* form) {
    const ScoreOptions scores = form ? *form : ScoreOptions{};
    if (kv->type == KVType::INT8)
        program->add<Attention<KVType::INT8>>(out, floats != 0, queries, *kv, *plan, scores);
    else
        program->add<Attention<KVType::BF16>>(out, floats != 0, queries, *kv, *plan, scores);
}

// The gated delta rule of `in`, which is what the matmuls of its layer write (delta.h). `conv` [tokens][channels], `gates`
// [tokens][2 * value heads] and `values` [tokens][values] are memory for it.
void program_delta(Program* program, const delta::Layer* layer, const RowStates* state, const float* in, float* conv,
                   float* gates, float* values, Rows out, int form, float* wide) {
    program->add<DeltaConv>(*layer, *state, in, conv, gates);
    program->add<DeltaRule>(*layer, *state, in, conv, gates, values);
    program->add<DeltaNorm>(*layer, in, values, out, ActivationForm(form), wide);
}

// The short convolution of `in` (short_conv.h). `out` has the activations of the product behind, or `floats`.
void program_short_conv(Program* program, const RowStates* state, const float* in, const float* weights, int channels,
                        int taps, Rows out, int floats) {
    program->add<ShortConv>(*state, in, weights, channels, taps, out, floats != 0);
}

void program_linear_add(Program* program, float* residual, Rows in, const Matrix* matrix, int width, float factor) {
    program->add<LinearAdd>(residual, in, *matrix, width, program->take_stride(width), factor);
}

void program_linear(Program* program, float* out, Rows in, const Matrix* matrix, int width) {
    const Product product{*matrix, in};
    program->add<Linear>(out, &product, 1, width, program->take_stride(width));
}

// The same of several matrices, one below the other.
void program_products(Program* program, float* out, const Product* products, int num_products, int width) {
    program->add<Linear>(out, products, num_products, width, width);
}

// The next of the above writes rows that are so many numbers apart.
void program_stride(Program* program, int stride) { program->stride = stride; }

// Adapters change the matmul that is recorded next, whose input is `in`.
void program_lora(Program* program, LoraSite* site, Rows in, int form) {
    Op* const before = program->last();
    Shrink& shrink = program->add<Shrink>(*site, in, ActivationForm(form));
    if (before && before->rows_out() == in.data) before->then(&shrink), shrink.follows = true;
    if (program->last_site && shrink.follows) program->last_site->next = &shrink;
    program->lora = program->last_site = site;
}

void program_swiglu(Program* program, Rows out, int floats, const Product* products, int num_products, int activation) {
    program->add<Swiglu>(out, floats != 0, products, num_products, Activation(activation));
}

void program_activate(Program* program, Rows out, int floats, const Product* products, int num_products, int activation,
                      int inner, XieluForm xielu) {
    program->add<Activate>(out, floats != 0, products, num_products, Activation(activation), inner, nullptr, xielu);
}

// The functions of a mixture of experts begin with this one. `gathered` are the activations that its matmuls read.
const Routing* program_route(Program* program, const float* logits, int stride, const RouteOptions* form, int experts,
                             int per_token, int max_tokens, const GatheredRows* gathered, int num_gathered) {
    const Routing& routing = program->add<Route>(logits, stride, *form, experts, per_token, max_tokens, gathered,
                                                 num_gathered).routing;
    for (int i = 0; i < num_gathered; i++) program->add<Gather>(routing, gathered[i]);
    return &routing;
}

// `inner` is 0 if there is a gate.
void program_experts_gate_up(Program* program, Rows out, int floats, const Product* products, int num_products,
                             int activation, float alpha, float limit, int inner, const Routing* routing) {
    if (inner)
        program->add<Activate>(out, floats != 0, products, num_products, Activation(activation), inner, routing);
    else
        program->add<Swiglu>(out, floats != 0, products, num_products, Activation(activation), SwigluForm{alpha, limit},
                             routing);
}

void program_experts_quantize(Program* program, Rows out, int form, const float* from, int width, const Routing* routing) {
    program->add<Quantize>(out, ActivationForm(form), from, width, routing->per_token);
}

void program_experts_down(Program* program, float* out, Rows in, const Matrix* matrix, int width, const Routing* routing) {
    const Product product{*matrix, in};
    program->add<Linear>(out, &product, 1, width, width, routing);
}

void program_combine(Program* program, float* to, int adds, const float* parts, const Routing* routing, int width,
                     const SharedExpert* shared, float factor) {
    program->add<Combine>(to, adds != 0, parts, *routing, width, program->take_stride(width), *shared, factor);
}

// How the logits of the next `program_sample` or `program_score` differ from the matmul's results.
void program_logit_form(Program* program, float scale, float softcap) { program->logit_form = {scale, softcap}; }

size_t best_bytes(int threads, int max_samples) { return sizeof(Best) * threads * max_samples; }

// The ops that are recorded from now on are of one rank, which has this part of the vocabulary.
void program_use_ranks(Program* program, const VocabShare* share) { program->vocab = *share; }

// The head, the wait for masks, and sampling. With a part of the vocabulary, logits and its `best` are in memory of all
// ranks, and rank 0 samples.
void program_sample(Program* program, Rows in, const Matrix* matrix, int vocab_size, float* logits, int max_samples,
                  const MaskTicket* ticket, const SamplingInputs* inputs) {
    const VocabShare& share = program->vocab;
    Ranks* const ranks = share.ranks;
    const int threads = ranks ? share.threads : program->thread_pool().size();
    const int all_threads = threads * (ranks ? ranks->num : 1);
    const size_t num_best = size_t(all_threads) * max_samples;
    Best* best = ranks ? share.best : reinterpret_cast<Best*>(program->best(sizeof(Best) * num_best));
    const int rank = ranks ? ranks->rank : 0;
    if (rank == 0) std::fill_n(best, num_best, NO_BEST);
    program->head = program->size();
    program->add<Head>(logits, best + size_t(rank) * threads * max_samples, max_samples, in, *matrix,
                       ranks ? share.size : vocab_size, share.first, vocab_size, inputs->greedy, program->logit_form);
    if (ranks) program->add<Barrier>(*ranks, "head", -1);
    if (rank != 0) return;
    program->add<WaitForMasks>(ticket, best, num_best);
    program->add<Sample>(*inputs, logits, best, max_samples, all_threads, vocab_size);
}

// The head, and the logprobs of given ids.
void program_score(Program* program, Rows in, const Matrix* matrix, int vocab_size, float* logits, int max_samples,
                   const Scores* scores) {
    const VocabShare& share = program->vocab;
    program->add<Head>(logits, nullptr, max_samples, in, *matrix, share.ranks ? share.size : vocab_size, share.first,
                       vocab_size, nullptr, program->logit_form);
    if (share.ranks) program->add<Barrier>(*share.ranks, "head", -1);
    if (share.ranks && share.ranks->rank != 0) return;
    program->add<Score>(*scores, logits, vocab_size);
}

// --- ranks

size_t ranks_bytes(int num) { return Ranks::bytes(num); }

Ranks* ranks_new(uint8_t* memory, int rank, int num, int spins, int ms) { return new Ranks(memory, rank, num, spins, ms); }
void ranks_delete(Ranks* ranks) { delete ranks; }
void ranks_set_timeout(Ranks* ranks, int timeout_ms) { ranks->set_timeout(timeout_ms); }

// This rank is at a step; see ranks.h for the results.
void ranks_announce(Ranks* ranks, uint64_t step) { ranks->announce(step); }
int ranks_begin(Ranks* ranks, uint64_t step) { return ranks->begin(step); }

// Rank 0 tells the others that a step's ids are complete, or another status.
void ranks_publish(Ranks* ranks, int status) { ranks->publish(status); }
int ranks_await_outcome(Ranks* ranks) { return ranks->await_outcome(); }

void ranks_set_busy(Ranks* ranks, int is_busy) { ranks->set_busy(is_busy != 0); }

double ranks_waited_s(const Ranks* ranks, int rank) { return ranks->waited_s(rank); }

// What the rank that was missed last had not finished.
const char* ranks_late(const Ranks* ranks, int* rank, int* layer) {
    *rank = ranks->late_rank, *layer = ranks->late_layer;
    return ranks->late_at.c_str();
}

// The ops that are added from now on are computed when all ranks have computed those before. `what` names the last one.
void program_barrier(Program* program, Ranks* ranks, const char* what, int layer) {
    program->add<Barrier>(*ranks, what, layer);
}

// --- stages of a pipeline

size_t board_bytes(int num) { return StepBoard::bytes(num); }
StepBoard* board_new(uint8_t* memory, int rank, int spins, int ms) { return new StepBoard(memory, rank, spins, ms); }
void board_delete(StepBoard* board) { delete board; }
void board_set_timeout(StepBoard* board, int timeout_ms) { board->set_timeout(timeout_ms); }

// This rank has done so many steps; see step_board.h.
void board_post(StepBoard* board, uint64_t done) { board->post(done); }
uint64_t board_wait(StepBoard* board, int rank, uint64_t least) { return board->wait(rank, least); }
void board_set_busy(StepBoard* board, int is_busy) { board->set_busy(is_busy != 0); }
int board_layer(const StepBoard* board, int rank) { return board->layer(rank); }
double board_waited_s(const StepBoard* board) { return board->waited_s(); }

// The program shows on the board which op it computes.
void program_use_board(Program* program, StepBoard* board) { program->at = board->at(); }
// The ops that are added from now on are of this layer; -1: of none.
void program_layer(Program* program, int layer) { program->layer = layer; }

// --- replaying

int program_run(Program* program, int tokens, int rows, int samples) { return program->run(tokens, rows, samples, nullptr); }

// Only the ops from `first` to before `end`; the step is the same as that of the ops before.
int program_run_ops(Program* program, int tokens, int rows, int first, int end) {
    return program->run_ops(tokens, rows, 0, nullptr, first, end);
}

// Computes logits again, and samples: the masks of the step before were late.
int program_sample_again(Program* program, int tokens, int rows, int samples) { return program->run(tokens, rows, samples, nullptr, true); }

int program_profile(Program* program, int tokens, int rows, int samples, double* seconds) {
    return program->run(tokens, rows, samples, seconds);
}
int program_size(const Program* program) { return program->size(); }
const char* program_name(const Program* program, int op) { return program->name(op); }

// out: bytes, flops, whether they are integer products. For the step that the arrays hold.
void program_cost(Program* program, int op, int tokens, int rows, int samples, double* out) {
    const Cost cost = program->cost(op, tokens, rows, samples);
    out[0] = cost.bytes, out[1] = cost.flops, out[2] = cost.integer;
}
}

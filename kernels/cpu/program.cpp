// A forward pass as a list of ops, recorded once and replayed by one call for each step.
//
// The functions below are the library's whole interface: C, so that Python calls them by ctypes, which lets the GIL go
// meanwhile. Memory that they are given belongs to the caller and must outlive the program. Sizes are run-time values:
// one library serves every model.
#include <cstdlib>
#include <memory>

#include "attention.h"
#include "embed.h"
#include "linear.h"
#include "norm.h"
#include "pack.h"
#include "pick.h"
#include "step.h"
#include "team.h"

namespace {

struct alignas(64) Counter {
    std::atomic<int> next{0};
};

struct Aligned {
    explicit Aligned(size_t bytes)
        : data(static_cast<uint8_t*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096 + 4096))) {}
    ~Aligned() { std::free(data); }
    Aligned(const Aligned&) = delete;
    uint8_t* const data;
};

class Program {
   public:
    Program(Team& team, const Step& step) : team_(team), step_(step) {}

    template <class O, class... Args>
    O& add(Args&&... args) {
        auto op = std::make_unique<O>(std::forward<Args>(args)...);
        O& added = *op;
        scratch_bytes_ = std::max(scratch_bytes_, op->scratch_bytes());
        ops_.push_back(std::move(op));
        return added;
    }

    // Seconds of each op where `seconds` is given. Returns 0, or the first status that an op ends with.
    int run(int tokens, int rows, int samples, double* seconds) {
        step_.tokens = tokens, step_.rows = rows, step_.samples = samples;
        while (memory_.size() < size_t(team_.size()) || scratch_made_ < scratch_bytes_) {
            if (scratch_made_ < scratch_bytes_) memory_.clear();
            scratch_made_ = scratch_bytes_;
            memory_.push_back(std::make_unique<Aligned>(scratch_bytes_));
        }
        if (next_.size() != ops_.size()) next_ = std::vector<Counter>(ops_.size());
        for (auto& counter : next_) counter.next.store(0, std::memory_order_relaxed);
        seconds_ = seconds;
        status_ = 0;
        team_.run([](void* program, int thread) { static_cast<Program*>(program)->work(thread); }, this);
        return status_;
    }

    Cost cost(int op, int tokens, int rows, int samples) {
        step_.tokens = tokens, step_.rows = rows, step_.samples = samples;
        return ops_[op]->cost(step_);
    }

    Team& team() { return team_; }
    int size() const { return int(ops_.size()); }
    const char* name(int op) const { return ops_[op]->name; }
    float* best(size_t bytes) {
        kept_.push_back(std::make_unique<Aligned>(bytes));
        return reinterpret_cast<float*>(kept_.back()->data);
    }

   private:
    void work(int thread) {
        const Scratch scratch{thread, memory_[thread]->data};
        for (size_t i = 0; i < ops_.size(); i++) {
            const auto began = seconds_ ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point();
            Op& op = *ops_[i];
            const int tiles = op.tiles(step_);
            for (int tile; (tile = next_[i].next.fetch_add(1, std::memory_order_relaxed)) < tiles;)
                op.tile(step_, tile, scratch);
            team_.barrier();
            if (seconds_ && thread == 0)
                seconds_[i] = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
            // Every thread sees the same, so all leave together.
            if (const int status = op.status()) {
                if (thread == 0) status_ = status;
                return;
            }
        }
    }

    Team& team_;
    Step step_;
    std::vector<std::unique_ptr<Op>> ops_;
    std::vector<Counter> next_;
    std::vector<std::unique_ptr<Aligned>> memory_, kept_;
    size_t scratch_bytes_ = 64, scratch_made_ = 0;
    double* seconds_ = nullptr;
    int status_ = 0;
};

}  // namespace

extern "C" {

int abi_version() { return 1; }

// --- threads

Team* team_new(int size, int spins) { return new Team(size, spins); }
void team_delete(Team* team) { delete team; }

// --- weights

size_t panel_bytes(const Matrix* matrix) { return matrix->panel_bytes(); }

// Output n is the row at rows[n] (pack.h says how rows lie there), or zeros where that is null.
void pack(Team* team, const Matrix* matrix, uint8_t* panels, const uint8_t* const* rows) {
    team->each(matrix->columns / PANEL, [=](int panel) { pack_panel(*matrix, panels, rows, panel); });
}

// Writes zeros to `bytes` of memory that may never have been touched.
void clear(Team* team, uint8_t* memory, size_t bytes) {
    constexpr size_t part = 2 << 20;
    team->each(int((bytes + part - 1) / part),
               [=](int i) { memset(memory + i * part, 0, std::min(part, bytes - i * part)); });
}

int act_bytes() { return sizeof(act); }
size_t activation_bytes(int form, int width) { return row_bytes(Form(form), width); }

// --- recording

Program* program_new(Team* team, const Step* step) { return new Program(*team, *step); }
void program_delete(Program* program) { delete program; }

void program_embed(Program* program, float* residual, const Matrix* table) {
    program->add<Embed>(residual, *table);
}

void program_norm(Program* program, Rows out, int form, const float* residual, const float* weight, int width,
                  float eps, int sampled) {
    program->add<Norm>(out, Form(form), residual, weight, width, eps, sampled != 0);
}

void program_quantize(Program* program, Rows out, const float* from, int width) {
    program->add<Quantize>(out, from, width);
}

void program_qkv(Program* program, float* queries, Rows in, const Matrix* matrix, int num_heads, const KV* kv,
                 const float* cos, const float* sin) {
    program->add<Qkv>(queries, in, *matrix, num_heads, *kv, cos, sin);
}

AttentionPlan* program_attention_plan(Program* program, int num_heads, int num_kv_heads, int window) {
    return &program->add<AttentionPlan>(num_heads, num_kv_heads, program->team().size(), window);
}

void program_attention(Program* program, Rows out, int floats, const float* queries, const KV* kv,
                       const AttentionPlan* plan) {
    program->add<Attention>(out, floats != 0, queries, *kv, *plan);
}

void program_linear_add(Program* program, float* residual, Rows in, const Matrix* matrix, int width) {
    program->add<LinearAdd>(residual, in, *matrix, width);
}

void program_gate_up(Program* program, Rows out, int floats, Rows in, const Matrix* matrix) {
    program->add<GateUp>(out, floats != 0, in, *matrix);
}

// The head, the wait for masks and the draw.
void program_pick(Program* program, Rows in, const Matrix* matrix, int vocab_size, float* logits, int max_samples,
                  const MaskTicket* ticket, const Draws* draws) {
    const int threads = program->team().size();
    const size_t num_best = size_t(threads) * max_samples;
    Best* best = reinterpret_cast<Best*>(program->best(sizeof(Best) * num_best));
    std::fill_n(best, num_best, NO_BEST);
    program->add<Head>(logits, best, max_samples, in, *matrix, vocab_size, draws->greedy);
    program->add<WaitForMasks>(ticket, best, num_best);
    program->add<Pick>(*draws, logits, best, max_samples, threads, vocab_size);
}

// --- replaying

int program_run(Program* program, int tokens, int rows, int samples) {
    return program->run(tokens, rows, samples, nullptr);
}

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

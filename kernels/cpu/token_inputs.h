// Inputs of each token for each layer (per-layer embeddings), and the gates that add them.
#pragma once

#include "activation.h"
#include "norm.h"
#include "pack.h"

// A table with a row for each id, in its file: a row has the numbers of all layers. Only the rows of a step are read.
struct FileTable {
    Format format;              // that the rows are read as
    int source;                 // a Source if that is not their format in the file, or 0
    const uint8_t* const* rows;  // [ids]
    size_t layer_bytes;         // of a row
    float scale;
};

// inputs = (norm(inputs) + row * scale) / sqrt(2), in place. `inputs` [tokens][layers * size] are projections of the
// tokens' embeddings; each layer's are normed by themselves. A tile is 16 tokens and a layer.
class TokenInputs final : public Op {
   public:
    TokenInputs(float* inputs, const FileTable& table, const NormWeights& norm, int size, int layers)
        : Op("token_inputs"), inputs_(inputs), table_(table), norm_(norm), layers_(layers),
          part_{table.format, ActivationForm::PLAIN, PANEL, size, nullptr, nullptr, nullptr} {}

    int tiles(const Step& step) const override { return ceil_div(step.tokens, PANEL) * layers_; }
    size_t scratch_bytes() const override { return panel_bytes() + size_t(part_.depth) * 4; }

    void tile(const Step& step, int index, const Scratch& scratch) override {
        const int first = index / layers_ * PANEL, layer = index % layers_, size = part_.depth;
        const int count = std::min(PANEL, step.tokens - first);
        const uint8_t* rows[PANEL] = {};
        for (int i = 0; i < count; i++) rows[i] = table_.rows[step.ids[first + i]] + layer * table_.layer_bytes;
        if (table_.source)
            pack_float_panel(part_, scratch.memory, rows, Source(table_.source), 0);
        else
            pack_panel(part_, scratch.memory, rows, 0);
        Matrix panel = part_;
        panel.panels = scratch.memory;
        float* row = reinterpret_cast<float*>(scratch.memory + panel_bytes());
        for (int i = 0; i < count; i++) {
            float* to = inputs_ + (size_t(first + i) * layers_ + layer) * size;
            unpack(panel, i, row);
            norm_.apply(to, to, size);
            for (int c = 0; c < size; c++) to[c] = (to[c] + row[c] * table_.scale) * 0.70710678f;
        }
    }

    Cost cost(const Step& step) const override {
        return {double(step.tokens) * layers_ * (double(table_.layer_bytes) + part_.depth * 8), 0};
    }

   private:
    size_t panel_bytes() const { return (part_.panel_bytes() + 63) / 64 * 64; }

    float* const inputs_;
    const FileTable table_;
    const NormWeights norm_;
    const int layers_;
    const Matrix part_;
};

// out = activation(gates) * inputs, in the form that the next product reads. `gates` [tokens][size]; rows of `inputs`
// are `stride` numbers apart.
class GateInputs final : public Op {
   public:
    GateInputs(Rows out, ActivationForm form, const float* gates, const float* inputs, int size, int stride,
               Activation kind)
        : Op("gate_inputs"), out_(out), form_(form), gates_(gates), inputs_(inputs), size_(size), stride_(stride),
          kind_(kind) {}

    int tiles(const Step& step) const override { return step.tokens; }
    size_t scratch_bytes() const override { return size_t(size_) * 4; }

    void tile(const Step& step, int token, const Scratch& scratch) override {
        float* values = reinterpret_cast<float*>(scratch.memory);
        switch (kind_) {
            case Activation::SILU: multiply<Activation::SILU>(token, values); break;
            case Activation::GELU: multiply<Activation::GELU>(token, values); break;
            case Activation::GELU_TANH: multiply<Activation::GELU_TANH>(token, values); break;
            case Activation::RELU: multiply<Activation::RELU>(token, values); break;
            case Activation::RELU2: multiply<Activation::RELU2>(token, values); break;
            case Activation::GELU_QUICK: multiply<Activation::GELU_QUICK>(token, values); break;
            case Activation::SWIGLU_OAI:
            case Activation::XIELU: return;  // need more than one number
        }
        if (form_ == ActivationForm::PLAIN)
            for (int c = 0; c < size_; c += LANES) store_acts(out_.plain(token) + c, load<vf>(values + c));
        else
            quantize(values, out_, token, size_, form_);
        row_is_written(step, token, scratch);
    }

    const uint8_t* rows_out() const override { return out_.data; }

    Cost cost(const Step& step) const override { return {double(step.tokens) * size_ * 12, 0}; }

   private:
    template <Activation KIND>
    void multiply(int token, float* values) const {
        const float *gates = gates_ + size_t(token) * size_, *inputs = inputs_ + size_t(token) * stride_;
        for (int c = 0; c < size_; c += LANES)
            store(values + c, activate<KIND>(load<vf>(gates + c)) * load<vf>(inputs + c));
    }

    const Rows out_;
    const ActivationForm form_;
    const float *const gates_, *const inputs_;
    const int size_, stride_;
    const Activation kind_;
};

// The layers of a decoder in one call: what the single ops compute, with the same bits, without a return to Python
// between them.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "ops.h"

namespace adapt {

struct Linear {
    Matrix matrix;
    std::vector<float> bias;  // empty: none
    const float *bias_or_null() const { return bias.empty() ? nullptr : bias.data(); }
};

// Rows of keys or values of a layer: [slots, key heads, width], dense.
struct Pages {
    void *data;
    std::size_t slots;
};

struct Routed {
    Matrix router;
    const float *selection_bias;  // or null
    Choice choice;
    Stack gate, up, down;
};

struct Layer {
    Heads heads;
    float eps, head_eps;
    const void *attention_norm, *ffn_norm, *q_norm, *k_norm;  // the last two may be null
    Linear q, k, v, out;
    Pages keys, values;
    std::unique_ptr<Routed> routed;
    // Of a dense layer, or the shared experts of a routed one.
    std::unique_ptr<std::vector<Linear>> dense;  // gate, up, down
};

// Rows of one pass. x [rows, hidden] is the residual stream, before and after.
struct Pass {
    std::size_t rows;
    void *x;
    const std::int64_t *slots;     // [rows]: where keys and values go
    const float *cosines, *sines;  // [rows, rotated width / 2]
    const Reading *readings;
    std::size_t sequences;
    const std::int64_t *head_rows;  // rows whose logits are wanted
    std::size_t wanted;
    float *logits;  // [wanted, vocabulary]; null: none
};

class Decoder {
  public:
    Decoder(const Kernels &kernels, Type type, std::size_t hidden, float eps)
        : kernels_(kernels), type_(type), hidden_(hidden), eps_(eps) {}

    std::vector<Layer> layers;
    const void *final_norm = nullptr;
    std::unique_ptr<Matrix> head;
    // Of a rank that has the first layer too: rows [vocabulary, hidden] of the type, or packed.
    const void *table = nullptr;
    std::unique_ptr<Matrix> packed_table;

    Type type() const { return type_; }
    std::size_t hidden() const { return hidden_; }
    const Kernels &kernels() const { return kernels_; }
    void run(const Pass &pass) const;
    // Rows of the embedding table.
    void embed(const std::int64_t *ids, std::size_t rows, void *x) const;

  private:
    Output rows_out(void *data, std::size_t width) const { return {type_, data, width}; }
    Input rows_in(const void *data, std::size_t rows, std::size_t width) const { return {type_, data, rows, width}; }
    void normalise(const void *x, const void *weight, float eps, std::size_t rows, std::size_t width, void *out) const;
    void add(void *x, const void *y, std::size_t rows) const;
    void attend(const Layer &layer, const Pass &pass, const void *normed, void *out) const;
    void feed_forward(const Layer &layer, const Pass &pass, const void *normed, void *out) const;
    void dense(const std::vector<Linear> &parts, const Pass &pass, const void *normed, void *out) const;

    Kernels kernels_;
    Type type_;
    std::size_t hidden_;
    float eps_;
};

}  // namespace adapt

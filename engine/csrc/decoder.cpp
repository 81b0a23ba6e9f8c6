#include "decoder.h"

#include <cstring>

#include "pool.h"
#include "scratch.h"

namespace adapt {
namespace {

// Rows below which waking others for a step over rows costs more than it saves.
constexpr std::size_t few = 8;

template <class F>
void each_row(std::size_t rows, F &&f) {
    parallel(rows < few ? 1 : threads(), [&](int part, int parts) {
        const Range range = share(rows, part, parts);
        for (std::size_t i = range.first; i < range.last; ++i) f(i);
    });
}

const char *at(const void *data, std::size_t bytes) { return static_cast<const char *>(data) + bytes; }
char *at(void *data, std::size_t bytes) { return static_cast<char *>(data) + bytes; }

}  // namespace

void Decoder::normalise(const void *x, const void *weight, float eps, std::size_t rows, std::size_t width,
                        void *out) const {
    const std::size_t row = width * bytes_of(type_);
    each_row(rows, [&](std::size_t i) {
        kernels_.rows.rms_norm(type_, at(x, i * row), weight, at(out, i * row), width, eps);
    });
}

void Decoder::add(void *x, const void *y, std::size_t rows) const {
    const std::size_t row = hidden_ * bytes_of(type_);
    each_row(rows,
             [&](std::size_t i) { kernels_.rows.add(type_, at(x, i * row), at(y, i * row), at(x, i * row), hidden_); });
}

void Decoder::attend(const Layer &layer, const Pass &pass, const void *normed, void *out) const {
    const Heads &heads = layer.heads;
    const std::size_t bytes = bytes_of(type_), rows = pass.rows;
    const std::size_t q_width = heads.heads * heads.width, k_width = heads.kv_heads * heads.width;
    const std::size_t v_width = heads.kv_heads * heads.value_width, c_width = heads.heads * heads.value_width;
    Scratch::Scope scratch;
    char *q = scratch.take<char>(rows * q_width * bytes), *k = scratch.take<char>(rows * k_width * bytes);
    char *v = scratch.take<char>(rows * v_width * bytes), *context = scratch.take<char>(rows * c_width * bytes);
    const Product products[3] = {{&layer.q.matrix, layer.q.bias_or_null(), rows_out(q, q_width)},
                                 {&layer.k.matrix, layer.k.bias_or_null(), rows_out(k, k_width)},
                                 {&layer.v.matrix, layer.v.bias_or_null(), rows_out(v, v_width)}};
    linear(kernels_, rows_in(normed, rows, hidden_), products, 3);
    const std::size_t half = heads.width / 2, head = heads.width * bytes;
    each_row(rows, [&](std::size_t i) {
        const float *cosines = pass.cosines + i * half, *sines = pass.sines + i * half;
        const auto turn = [&](char *x, const void *norm, std::size_t count) {
            for (std::size_t h = 0; h < count; ++h, x += head) {
                if (norm) kernels_.rows.rms_norm(type_, x, norm, x, heads.width, layer.head_eps);
                kernels_.rows.rotate(type_, x, cosines, sines, x, half);
            }
        };
        turn(q + i * q_width * bytes, layer.q_norm, heads.heads);
        turn(k + i * k_width * bytes, layer.k_norm, heads.kv_heads);
        const auto slot = static_cast<std::size_t>(pass.slots[i]);
        std::memcpy(at(layer.keys.data, slot * k_width * bytes), k + i * k_width * bytes, k_width * bytes);
        std::memcpy(at(layer.values.data, slot * v_width * bytes), v + i * v_width * bytes, v_width * bytes);
    });
    attention(kernels_, heads, HeadRows{type_, q, q_width, heads.width},
              HeadRows{type_, layer.keys.data, k_width, heads.width},
              HeadRows{type_, layer.values.data, v_width, heads.value_width}, pass.readings, pass.sequences, type_,
              context, nullptr);
    linear(kernels_, rows_in(context, rows, c_width), layer.out.matrix, layer.out.bias_or_null(),
           rows_out(out, hidden_));
}

void Decoder::dense(const std::vector<Linear> &parts, const Pass &pass, const void *normed, void *out) const {
    const Linear &gate = parts[0], &up = parts[1], &down = parts[2];
    const std::size_t inter = gate.matrix.columns, bytes = bytes_of(type_), rows = pass.rows;
    Scratch::Scope scratch;
    char *gates = scratch.take<char>(rows * inter * bytes), *ups = scratch.take<char>(rows * inter * bytes);
    const Product products[2] = {{&gate.matrix, gate.bias_or_null(), rows_out(gates, inter)},
                                 {&up.matrix, up.bias_or_null(), rows_out(ups, inter)}};
    linear(kernels_, rows_in(normed, rows, hidden_), products, 2);
    each_row(rows, [&](std::size_t i) {
        char *own = gates + i * inter * bytes;
        kernels_.rows.swiglu(type_, own, ups + i * inter * bytes, own, inter);
    });
    linear(kernels_, rows_in(gates, rows, inter), down.matrix, down.bias_or_null(), rows_out(out, hidden_));
}

void Decoder::feed_forward(const Layer &layer, const Pass &pass, const void *normed, void *out) const {
    if (!layer.routed) return dense(*layer.dense, pass, normed, out);
    const Routed &routed = *layer.routed;
    const Choice &choice = routed.choice;
    const std::size_t rows = pass.rows;
    Scratch::Scope scratch;
    float *logits = scratch.take<float>(rows * choice.experts), *weights = scratch.take<float>(rows * choice.chosen);
    std::int64_t *ids = scratch.take<std::int64_t>(rows * choice.chosen);
    const Input in = rows_in(normed, rows, hidden_);
    linear(kernels_, in, routed.router, nullptr, Output{Type::f32, logits, choice.experts});
    route(kernels_, logits, rows, choice.experts, routed.selection_bias, choice, nullptr, nullptr, ids, weights);
    experts(kernels_, in, ids, weights, choice.chosen, routed.gate, routed.up, routed.down, rows_out(out, hidden_));
    if (!layer.dense) return;
    char *shared = scratch.take<char>(rows * hidden_ * bytes_of(type_));
    dense(*layer.dense, pass, normed, shared);
    add(out, shared, rows);
}

void Decoder::embed(const std::int64_t *ids, std::size_t rows, void *x) const {
    if (packed_table) return unpack(*packed_table, ids, rows, x, hidden_);
    const std::size_t row = hidden_ * bytes_of(type_);
    for (std::size_t i = 0; i < rows; ++i)
        std::memcpy(at(x, i * row), at(table, static_cast<std::size_t>(ids[i]) * row), row);
}

void Decoder::run(const Pass &pass) const {
    Scratch::Scope scratch;
    const std::size_t size = pass.rows * hidden_ * bytes_of(type_);
    char *normed = scratch.take<char>(size), *out = scratch.take<char>(size);
    for (const Layer &layer : layers) {
        normalise(pass.x, layer.attention_norm, layer.eps, pass.rows, hidden_, normed);
        attend(layer, pass, normed, out);
        add(pass.x, out, pass.rows);
        normalise(pass.x, layer.ffn_norm, layer.eps, pass.rows, hidden_, normed);
        feed_forward(layer, pass, normed, out);
        add(pass.x, out, pass.rows);
    }
    if (!pass.logits || !pass.wanted) return;
    const std::size_t row = hidden_ * bytes_of(type_), vocab = head->columns;
    char *chosen = scratch.take<char>(pass.wanted * row);
    each_row(pass.wanted, [&](std::size_t i) {
        kernels_.rows.rms_norm(type_, at(pass.x, static_cast<std::size_t>(pass.head_rows[i]) * row), final_norm,
                               chosen + i * row, hidden_, eps_);
    });
    // Rounded to the model's type on the way, as the families' code does.
    char *rounded = scratch.take<char>(pass.wanted * vocab * bytes_of(type_));
    linear(kernels_, rows_in(chosen, pass.wanted, hidden_), *head, nullptr, rows_out(rounded, vocab));
    each_row(pass.wanted, [&](std::size_t i) {
        kernels_.rows.widen(type_, rounded + i * vocab * bytes_of(type_), pass.logits + i * vocab, vocab);
    });
}

}  // namespace adapt

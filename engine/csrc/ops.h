// Ops over many rows: threads, grouping by expert, scratch memory. What computes is a table of kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matrix.h"
#include "product.h"
#include "rows.h"

namespace adapt {

struct Kernels {
    RowKernels rows;
    ProductKernels products;
};

// Rows of elements of one type; elements of a row are adjacent, ``stride`` elements lie between rows.
struct Input {
    Type type;
    const void *data;
    std::size_t rows, stride;
    const void *row(std::size_t i) const { return static_cast<const char *>(data) + i * stride * bytes_of(type); }
};
struct Output {
    Type type;
    void *data;
    std::size_t stride;
    void *row(std::size_t i) const { return static_cast<char *>(data) + i * stride * bytes_of(type); }
};

// Matrices of equal shape, one after the other.
struct Stack {
    Matrix first;
    std::size_t count;
    Matrix operator[](std::size_t index) const {
        Matrix one = first;
        one.data += index * first.columns * first.depth * element_bytes(first.format);
        if (one.scales) one.scales += index * first.columns;
        return one;
    }
};

// Whether rows of this type can be multiplied with a matrix of this format.
bool multiplies(Type type, Format format);

// out[i, c] = x[i] . column c + bias[c]; bias in float32, or null.
void linear(const Kernels &kernels, const Input &x, const Matrix &matrix, const float *bias, const Output &out);

// One of several products of the same rows.
struct Product {
    const Matrix *matrix;
    const float *bias;
    Output out;
};

// The same for matrices of one format, depth and segment, in one go.
void linear(const Kernels &kernels, const Input &x, const Product *products, std::size_t count);

struct Range;

// The sums of several ranges of depth elements, each from one border of a segment to another, as they are before
// scales, bias and rounding: out[(r * rows + i) * columns + c]. Matrix and x may be parts of longer ones: of int8,
// ``largest`` is then the largest magnitude of each whole row (otherwise null, and not read).
void linear_sums(const Kernels &kernels, const Input &x, const Matrix &matrix, const Range *ranges, std::size_t count,
                 const float *largest, float *out);

// What `linear` does with its sums [rows, columns]. ``largest``: of each row of its x; read of int8 only.
void linear_finish(const Kernels &kernels, const float *sums, std::size_t rows, const Matrix &matrix,
                   const float *largest, const float *bias, const Output &out);

// Slot i is row i / slots of x through expert ids[i]: down(silu(gate(row)) * up(row)), to row i of out. Everything
// that the separate ops round is rounded here too. ids must be checked.
void expert_rows(const Kernels &kernels, const Input &x, const std::int64_t *ids, std::size_t count, std::size_t slots,
                 const Stack &gate, const Stack &up, const Stack &down, const Output &out);

// The same for every slot of x [rows], then per row the sum of its slots times weights, in their order.
void experts(const Kernels &kernels, const Input &x, const std::int64_t *ids, const float *weights, std::size_t slots,
             const Stack &gate, const Stack &up, const Stack &down, const Output &out);

// out[i] = sum over slots of down[i * slots + slot] * weights[i, slot], columns in parallel.
void combine(const Kernels &kernels, const Input &down, const float *weights, std::size_t slots, std::size_t width,
             const Output &out);

struct Choice {
    std::size_t experts, chosen, groups, kept_groups;
    bool softmax, renormalise;
    float scale;
};

// Scores, selection [rows, experts], ids and weights [rows, chosen] from logits; selection bias or null. scores and
// selection may be null.
void route(const Kernels &kernels, const float *logits, std::size_t rows, std::size_t stride, const float *bias,
           const Choice &choice, float *scores, float *selection, std::int64_t *ids, float *weights);

}  // namespace adapt

// Attention over keys and values that lie in pages, for any number of sequences and rows: prefill and decode alike.
#pragma once

#include "ops.h"

namespace adapt {

struct Heads {
    std::size_t heads, kv_heads, width, value_width;
    float scale;
    std::size_t window;  // keys that a query sees, itself included; 0: all before it
};

// Rows of heads: element strides between rows and between heads; elements of a head are adjacent.
struct HeadRows {
    Type type;
    const void *data;
    std::size_t row, head;
    const void *at(std::size_t index, std::size_t which) const {
        return static_cast<const char *>(data) + (index * row + which * head) * bytes_of(type);
    }
};

// Rows [first, first + rows) of the queries belong to one sequence.
struct Reading {
    std::size_t first, rows, keys;
    const std::int64_t *q_positions;  // [rows], ascending
    const std::int64_t *slots;        // [keys]: row of each key; null: key i is row i
    const std::int64_t *k_positions;  // [keys], ascending; null: key i is at position i
};

// out [rows, heads, value_width], dense, of out_type; weights (natural log-sum-exp of the scaled scores, [rows, heads])
// or null. A row without visible keys is 0, with weight -infinity.
//
// Keys come in chunks of 256 by position, whoever asks. Within a chunk scores are exponentiated against the row's
// largest, and summed in order; chunks are merged along the balanced tree over their indices. Keys that a row does not
// see add exact zeros, so that neither other rows nor later keys can change its bits.
void attention(const Kernels &kernels, const Heads &heads, const HeadRows &q, const HeadRows &k, const HeadRows &v,
               const Reading *readings, std::size_t count, Type out_type, void *out, float *weights);

}  // namespace adapt

// The tile kernel once, over the instruction set `I` and the format `F` that each translation unit supplies:
//   I::Float            sixteen float32 lanes: I::zero, I::add, I::load, I::store
//   I::most_rows, I::most_vectors
//                       rows and sixteen-column vectors whose sums fit into registers
//   F::Sum, F::Raw      sixteen sums, sixteen columns' elements of one group
//   F::begin(sums, segment), F::load<part>(data, columns), F::spread(x, k), F::dot(sum, raw, spread), F::value(sum)
//   F::load_tail(data, count, columns), F::spread_tail(x, k, count)
//                       the last `count` elements of a segment that is no multiple of the group
// Everything has internal linkage: the same names exist under other instruction sets in other files.
#pragma once

#include "product.h"

namespace adapt {
namespace {

constexpr std::size_t lanes = 16;
// Bytes between what is read and what is asked for in advance: a panel is one stream, and panels follow each other.
constexpr std::size_t ahead = 2048;
// Enough levels for any depth that fits into memory: the tree of 2^24 segments.
constexpr int most_levels = 24;

// One segment of one row tile: adds its products to sum.
template <class I, class F, int R, int V, bool partial>
inline void segment_of(const unsigned char *&data, std::size_t width, std::size_t first, std::size_t columns,
                       const void *const *x, std::size_t begin, std::size_t length,
                       typename F::Sum (&sum)[R][V]) {
    const std::size_t groups = length / F::group, tail = length % F::group;
    const std::size_t step = width * F::group * F::bytes;
    const unsigned char *at = data + first * F::group * F::bytes;
    for (std::size_t g = 0; g < groups; ++g, at += step) {
        typename F::Raw raw[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const unsigned char *line = at + v * lanes * F::group * F::bytes;
            __builtin_prefetch(line + ahead);
            if (partial && v == V - 1)
                raw[v] = F::template load<true>(line, columns);
            else
                raw[v] = F::template load<false>(line, lanes);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const auto spread = F::spread(x[r], begin + g * F::group);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[r][v] = F::dot(sum[r][v], raw[v], spread);
        }
    }
    data += groups * step;
    if (tail) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const std::size_t present = partial && v == V - 1 ? columns : lanes;
            const auto raw = F::load_tail(data + (first + v * lanes) * tail * F::bytes, tail, present);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                sum[r][v] = F::dot(sum[r][v], raw, F::spread_tail(x[r], begin + groups * F::group, tail));
        }
        data += tail * width * F::bytes;
    }
}

// V vectors of a panel from column ``first`` on, the last one with ``columns`` columns.
template <class I, class F, int R, int V, bool partial>
void vectors_of(const Matrix &matrix, std::size_t panel, std::size_t first, std::size_t columns, const void *const *x,
                const std::int32_t *const *sums, float *out) {
    using Float = typename I::Float;
    const std::size_t width = matrix.width(panel), segments = matrix.segments();
    const unsigned char *data = matrix.data + matrix.panel_offset(panel);
    alignas(64) float stack[most_levels][R * V * lanes];
    for (std::size_t s = 0; s < segments; ++s) {
        const std::size_t begin = s * matrix.segment, left = matrix.depth - begin;
        typename F::Sum sum[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[r][v] = F::begin(sums ? sums[r] : nullptr, s);
        segment_of<I, F, R, V, partial>(data, width, first, columns, x, begin,
                                        left < matrix.segment ? left : matrix.segment, sum);
        Float value[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) value[r][v] = F::value(sum[r][v]);
        // A binary counter: complete subtrees merge at once; after the last segment all that are left do.
        const bool last = s + 1 == segments;
        int level = 0;
        for (std::size_t bits = s; last ? bits != 0 : (bits & 1) != 0; bits >>= 1, ++level) {
            if (!(bits & 1)) continue;
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v)
                    value[r][v] = I::add(I::load(stack[level] + (r * V + v) * lanes), value[r][v]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v)
                I::store(last ? out + r * panel_columns + first + v * lanes : stack[level] + (r * V + v) * lanes,
                         value[r][v]);
    }
}

template <class I, class F, int R>
void rows_of(const Matrix &matrix, std::size_t panel, const void *const *x, const std::int32_t *const *sums,
             float *out) {
    const std::size_t width = matrix.width(panel);
    if constexpr (I::most_vectors == 4) {
        const std::size_t columns = (width - 1) % lanes + 1;
        if (width == panel_columns) return vectors_of<I, F, R, 4, false>(matrix, panel, 0, lanes, x, sums, out);
        if (width > 3 * lanes) return vectors_of<I, F, R, 4, true>(matrix, panel, 0, columns, x, sums, out);
        if (width > 2 * lanes) return vectors_of<I, F, R, 3, true>(matrix, panel, 0, columns, x, sums, out);
        if (width > lanes) return vectors_of<I, F, R, 2, true>(matrix, panel, 0, columns, x, sums, out);
        vectors_of<I, F, R, 1, true>(matrix, panel, 0, columns, x, sums, out);
    } else {
        for (std::size_t first = 0; first < width; first += lanes) {
            if (width - first >= lanes)
                vectors_of<I, F, R, 1, false>(matrix, panel, first, lanes, x, sums, out);
            else
                vectors_of<I, F, R, 1, true>(matrix, panel, first, width - first, x, sums, out);
        }
    }
}

template <class I, class F>
void tile_in(const Matrix &matrix, std::size_t panel, const void *const *x, const std::int32_t *const *sums,
             std::size_t rows, float *out) {
    switch (rows) {
        case 1:
            return rows_of<I, F, 1>(matrix, panel, x, sums, out);
        case 2:
            return rows_of<I, F, 2>(matrix, panel, x, sums, out);
        case 3:
            return rows_of<I, F, 3>(matrix, panel, x, sums, out);
        case 4:
            return rows_of<I, F, 4>(matrix, panel, x, sums, out);
        case 5:
            if constexpr (I::most_rows >= 5) return rows_of<I, F, 5>(matrix, panel, x, sums, out);
            break;
        default:
            if constexpr (I::most_rows >= 6) return rows_of<I, F, 6>(matrix, panel, x, sums, out);
    }
}

template <class I>
void tile_any(const Matrix &matrix, std::size_t panel, const void *const *x, const std::int32_t *const *sums,
              std::size_t rows, float *out) {
    switch (matrix.format) {
        case Format::f32:
            return tile_in<I, typename I::F32>(matrix, panel, x, sums, rows, out);
        case Format::bf16:
            return tile_in<I, typename I::BF16>(matrix, panel, x, sums, rows, out);
        case Format::f16:
            return tile_in<I, typename I::F16>(matrix, panel, x, sums, rows, out);
        case Format::i8:
            return tile_in<I, typename I::I8>(matrix, panel, x, sums, rows, out);
    }
}

template <class I>
ProductKernels products_over() {
    return ProductKernels{I::most_rows, &tile_any<I>};
}

}  // namespace
}  // namespace adapt

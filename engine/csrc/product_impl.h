// The tile kernel once, over the instruction set `I` and the format `F` that each translation unit supplies:
//   I::Float            sixteen float32 lanes: I::zero, I::add, I::load, I::store
//   I::most_rows, I::block_rows, I::most_sums
//                       see ProductKernels; sixteen-column sums that fit into registers
//   I::transpose, I::interleave
//                       sixteen rows of sixteen 32-bit numbers; two rows of sixteen 16-bit ones
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
// With several rows a group takes long, and 2 KB ahead came too late: 34 GB/s at six rows, 49 with 12 KB (one thread).
constexpr std::size_t ahead = 12288;

// What is asked for in advance while groups are multiplied, ``count`` places a group. A single tile streams what it
// reads itself. The tiles of several share the next panel among themselves: it arrives from memory while this one is
// computed with.
struct Advance {
    const unsigned char *at;
    std::size_t step, gap;

    Advance(const unsigned char *panel, std::size_t bytes, std::size_t line, std::size_t first, std::size_t turn,
            std::size_t turns, std::size_t count)
        : at(turns > 1 ? panel + bytes + bytes * turn / turns : panel + first + ahead),
          step(turns > 1 ? (line + turns - 1) / turns : line),
          gap(turns > 1 ? (step + count - 1) / count : 64) {}
};

// Enough levels for any depth that fits into memory: the tree of 2^24 segments.
constexpr int most_levels = 24;

// The last ``tail`` elements of a segment that is no multiple of the group.
template <class F, int R, int V, bool partial>
__attribute__((noinline)) void add_tail(const unsigned char *data, std::size_t tail, std::size_t columns,
                                        const void *const *x, std::size_t k, typename F::Sum *sums) {
    for (int v = 0; v < V; ++v) {
        const auto raw =
            F::load_tail(data + v * lanes * tail * F::bytes, tail, partial && v == V - 1 ? columns : lanes);
        for (int r = 0; r < R; ++r) sums[r * V + v] = F::dot(sums[r * V + v], raw, F::spread_tail(x[r], k, tail));
    }
}

// One segment of one row tile: adds its products to sum.
template <class I, class F, int R, int V, bool partial>
ADAPT_INLINE void segment_of(const unsigned char *&data, std::size_t width, std::size_t first, std::size_t columns,
                             const void *const *x, std::size_t begin, std::size_t length, Advance &advance,
                             typename F::Sum (&sum)[R][V]) {
    const std::size_t groups = length / F::group, tail = length % F::group;
    const std::size_t step = width * F::group * F::bytes;
    const unsigned char *at = data + first * F::group * F::bytes, *soon = advance.at;
    const std::size_t soon_step = advance.step, gap = advance.gap;
    for (std::size_t g = 0; g < groups; ++g, at += step, soon += soon_step) {
        typename F::Raw raw[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const unsigned char *line = at + v * lanes * F::group * F::bytes;
            __builtin_prefetch(soon + v * gap, 0, 2);
            if (partial && v == V - 1)
                raw[v] = F::template load<true>(line, columns);
            else
                raw[v] = F::template load<false>(line, lanes);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const auto spread = F::spread(x[r], begin + g * F::group);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[r][v] = F::dot(sum[r][v], raw[v], spread);
        }
    }
    data += groups * step;
    advance.at = soon;
    if (tail) {
        // By a function of its own, over memory: its calls must not cost the loop above its registers.
        typename F::Sum kept[R][V];
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) kept[r][v] = sum[r][v];
        add_tail<F, R, V, partial>(data + first * tail * F::bytes, tail, columns, x, begin + groups * F::group,
                                   &kept[0][0]);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[r][v] = kept[r][v];
        data += tail * width * F::bytes;
    }
}

// V vectors of a panel from column ``first`` on, the last one with ``columns`` columns.
template <class I, class F, int R, int V, bool partial>
void vectors_of(const Matrix &matrix, std::size_t panel, std::size_t first, std::size_t columns, const void *const *x,
                const std::int32_t *const *sums, std::size_t turn, std::size_t turns, float *out) {
    using Float = typename I::Float;
    const std::size_t width = matrix.width(panel), segments = matrix.segments();
    const unsigned char *data = matrix.data + matrix.panel_offset(panel);
    // Passes over the panel's vectors are turns of their own.
    const std::size_t passes = turns > 1 ? (width + V * lanes - 1) / (V * lanes) : 1;
    Advance advance(data, width * matrix.depth * F::bytes, width * F::group * F::bytes, first * F::group * F::bytes,
                    turns > 1 ? turn * passes + first / (V * lanes) : 0, turns * passes, V);
    alignas(64) float stack[most_levels][R * V * lanes];
    for (std::size_t s = 0; s < segments; ++s) {
        const std::size_t begin = s * matrix.segment, left = matrix.depth - begin;
        typename F::Sum sum[R][V];
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[r][v] = F::begin(sums ? sums[r] : nullptr, s);
        segment_of<I, F, R, V, partial>(data, width, first, columns, x, begin,
                                        left < matrix.segment ? left : matrix.segment, advance, sum);
        Float value[R][V];
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) value[r][v] = F::value(sum[r][v]);
        // A binary counter: complete subtrees merge at once; after the last segment all that are left do.
        const bool last = s + 1 == segments;
        int level = 0;
        for (std::size_t bits = s; last ? bits != 0 : (bits & 1) != 0; bits >>= 1, ++level) {
            if (!(bits & 1)) continue;
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v)
                    value[r][v] = I::add(I::load(stack[level] + (r * V + v) * lanes), value[r][v]);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v)
                I::store(last ? out + r * panel_columns + first + v * lanes : stack[level] + (r * V + v) * lanes,
                         value[r][v]);
    }
}

template <class I, class F, int R>
void rows_of(const Matrix &matrix, std::size_t panel, const void *const *x, const std::int32_t *const *sums,
             std::size_t turn, std::size_t turns, float *out) {
    // As many vectors at once as leave room for the sums of R rows: 4, 2 or 1.
    constexpr int most = I::most_sums / R, V = most >= 4 ? 4 : most >= 2 ? 2 : 1;
    const std::size_t width = matrix.width(panel);
    std::size_t first = 0;
    for (; first + V * lanes <= width; first += V * lanes)
        vectors_of<I, F, R, V, false>(matrix, panel, first, lanes, x, sums, turn, turns, out);
    if (first == width) return;
    const std::size_t left = width - first, columns = (left - 1) % lanes + 1;
    if constexpr (V == 4) {
        if (left > 3 * lanes)
            return vectors_of<I, F, R, 4, true>(matrix, panel, first, columns, x, sums, turn, turns, out);
        if (left > 2 * lanes)
            return vectors_of<I, F, R, 3, true>(matrix, panel, first, columns, x, sums, turn, turns, out);
    }
    if constexpr (V >= 2)
        if (left > lanes) return vectors_of<I, F, R, 2, true>(matrix, panel, first, columns, x, sums, turn, turns, out);
    vectors_of<I, F, R, 1, true>(matrix, panel, first, columns, x, sums, turn, turns, out);
}

template <class I, class F, int R>
void tile_in(const Matrix &matrix, std::size_t panel, const void *const *x, const std::int32_t *const *sums,
             std::size_t rows, std::size_t turn, std::size_t turns, float *out) {
    if (rows == R) return rows_of<I, F, R>(matrix, panel, x, sums, turn, turns, out);
    if constexpr (R > 1) tile_in<I, F, R - 1>(matrix, panel, x, sums, rows, turn, turns, out);
}

template <class I>
void tile_any(const Matrix &matrix, std::size_t panel, const void *const *x, const std::int32_t *const *sums,
              std::size_t rows, std::size_t turn, std::size_t turns, float *out) {
    switch (matrix.format) {
        case Format::f32:
            return tile_in<I, typename I::F32, I::most_rows>(matrix, panel, x, sums, rows, turn, turns, out);
        case Format::bf16:
            return tile_in<I, typename I::BF16, I::most_rows>(matrix, panel, x, sums, rows, turn, turns, out);
        case Format::f16:
            return tile_in<I, typename I::F16, I::most_rows>(matrix, panel, x, sums, rows, turn, turns, out);
        case Format::i8:
            return tile_in<I, typename I::I8, I::most_rows>(matrix, panel, x, sums, rows, turn, turns, out);
    }
}

template <class I, class F>
double multiply_in(std::size_t rounds, float *result) {
    constexpr int V = I::most_sums >= 24 ? 4 : 1, R = I::most_sums / V;
    alignas(64) unsigned char numbers[V * lanes * 4];
    // Small numbers in every format; what they are must not be seen, or equal sums are computed once.
    for (std::size_t i = 0; i < sizeof numbers; ++i) numbers[i] = static_cast<unsigned char>(0x30 + i % 13);
    const unsigned char *from = numbers;
    asm volatile("" : "+r"(from) : : "memory");
    const std::int32_t nothing = 0;
    typename F::Raw raw[V];
    typename F::Sum sum[R][V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) raw[v] = F::template load<false>(from + v * lanes * F::group * F::bytes, lanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[r][v] = F::begin(&nothing, 0);
    for (std::size_t i = 0; i < rounds; ++i) {
        // Loaded anew, as in a product; the compiler must not see that it never changes.
        const void *x = from;
        asm volatile("" : "+r"(x) : : "memory");
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const auto spread = F::spread(x, r);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[r][v] = F::dot(sum[r][v], raw[v], spread);
        }
    }
    alignas(64) float found[lanes];
    *result = 0.0f;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            I::store(found, F::value(sum[r][v]));
            *result += found[0];
        }
    return 2.0 * R * V * lanes * F::group * static_cast<double>(rounds);
}

template <class I>
double multiply_any(Format format, std::size_t rounds, float *result) {
    switch (format) {
        case Format::f32:
            return multiply_in<I, typename I::F32>(rounds, result);
        case Format::bf16:
            return multiply_in<I, typename I::BF16>(rounds, result);
        case Format::f16:
            return multiply_in<I, typename I::F16>(rounds, result);
        default:
            return multiply_in<I, typename I::I8>(rounds, result);
    }
}

template <class I>
float read_all(const void *data, std::size_t bytes) {
    const float *p = static_cast<const float *>(data);
    alignas(64) float found[lanes] = {};
    typename I::Float sum[4] = {I::load(found), I::load(found), I::load(found), I::load(found)};
    for (std::size_t i = 0; i + 4 * lanes <= bytes / sizeof(float); i += 4 * lanes)
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
            __builtin_prefetch(reinterpret_cast<const char *>(p + i + v * lanes) + ahead);
            sum[v] = I::add(sum[v], I::load(p + i + v * lanes));
        }
    I::store(found, I::add(I::add(sum[0], sum[1]), I::add(sum[2], sum[3])));
    float total = 0.0f;
    for (std::size_t i = 0; i < lanes; ++i) total += found[i];
    return total;
}

template <class I>
void transpose_rows(const void *const *rows, std::size_t unit, std::size_t units, unsigned char *out,
                    std::size_t step) {
    std::size_t u = 0;
    if (unit == 4)
        for (; u + lanes <= units; u += lanes) I::transpose(rows, 4 * u, out + u * step, step);
    for (; u < units; ++u)
        for (std::size_t i = 0; i < lanes; ++i) {
            const unsigned char *from = static_cast<const unsigned char *>(rows[i]) + u * unit;
            std::memcpy(out + u * step + i * unit, from, unit == 4 ? 4 : unit);
        }
}

template <class I>
void interleave_rows(const void *a, const void *b, std::size_t width, unsigned char *out) {
    const unsigned char *first = static_cast<const unsigned char *>(a), *second = static_cast<const unsigned char *>(b);
    std::size_t c = 0;
    for (; c + lanes <= width; c += lanes) I::interleave(first + 2 * c, second + 2 * c, out + 4 * c);
    for (; c < width; ++c) {
        std::memcpy(out + 4 * c, first + 2 * c, 2);
        std::memcpy(out + 4 * c + 2, second + 2 * c, 2);
    }
}

// Sixteen rows of sixteen 32-bit numbers, plainly.
inline void transpose_plainly(const void *const *rows, std::size_t offset, unsigned char *out, std::size_t step) {
    for (std::size_t u = 0; u < lanes; ++u)
        for (std::size_t i = 0; i < lanes; ++i)
            std::memcpy(out + u * step + 4 * i, static_cast<const unsigned char *>(rows[i]) + offset + 4 * u, 4);
}

template <class I>
ProductKernels products_over() {
    return ProductKernels{I::most_rows,        I::block_rows,    &tile_any<I>, &transpose_rows<I>,
                          &interleave_rows<I>, &multiply_any<I>, &read_all<I>};
}

}  // namespace
}  // namespace adapt

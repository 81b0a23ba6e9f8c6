#include "linear.h"

#include <cstring>

#include "pool.h"

namespace adapt {

bool multiplies(Type type, Format format) {
    switch (format) {
        case Format::bf16:
            return type == Type::bf16;
        case Format::f16:
            return type == Type::f16;
        default:
            return true;
    }
}

namespace {

bool direct(Type type, Format format) {
    return (type == Type::f32 && format == Format::f32) || (type == Type::bf16 && format == Format::bf16);
}

// Rows below which a change of format is not worth waking anyone for.
constexpr std::size_t few = 8;

}  // namespace

Prepared prepare(const Kernels &kernels, Type type, const void *const *rows, std::size_t count, const Matrix &matrix,
                 Scratch::Scope &scratch, const float *largest) {
    if (direct(type, matrix.format)) return {rows, nullptr, nullptr};
    const std::size_t depth = matrix.depth, segments = matrix.segments();
    const bool whole = matrix.format == Format::i8;
    const void **x = scratch.take<const void *>(count);
    const std::int32_t **sums = whole ? scratch.take<const std::int32_t *>(count) : nullptr;
    float *scales = whole ? scratch.take<float>(count) : nullptr;
    // Rows start on cache lines of their own.
    const std::size_t width = (depth * (whole ? 1 : sizeof(float)) + 63) / 64 * 64;
    char *values = scratch.take<char>(count * width);
    std::int32_t *found = whole ? scratch.take<std::int32_t>(count * segments) : nullptr;
    parallel(count < few ? 1 : threads(), [&](int part, int parts) {
        const Range range = share(count, part, parts);
        Scratch::Scope inner;
        float *wide = whole ? inner.take<float>(depth) : nullptr;
        for (std::size_t i = range.first; i < range.last; ++i) {
            char *own = values + i * width;
            x[i] = own;
            if (whole) {
                sums[i] = found + i * segments;
                scales[i] =
                    kernels.rows.quantise(type, rows[i], wide, reinterpret_cast<std::int8_t *>(own),
                                          found + i * segments, depth, matrix.segment, largest ? largest[i] : 0.0f);
            } else {
                kernels.rows.widen(type, rows[i], reinterpret_cast<float *>(own), depth);
            }
        }
    });
    return {x, sums, scales};
}

void linear(const Kernels &kernels, const Input &x, const Product *products, std::size_t count) {
    if (!x.rows) return;
    Scratch::Scope scratch;
    const void **rows = scratch.take<const void *>(x.rows);
    for (std::size_t i = 0; i < x.rows; ++i) rows[i] = x.row(i);
    const Prepared ready = prepare(kernels, x.type, rows, x.rows, *products[0].matrix, scratch);
    std::size_t panels = 0;
    for (std::size_t i = 0; i < count; ++i) panels += products[i].matrix->panels();
    const std::size_t most = static_cast<std::size_t>(threads());
    // Panels are shared out, so that every weight is read by one thread; where they are few, rows are too.
    const std::size_t pieces =
        panels >= 4 * most || panels % most == 0 || x.rows < 2 * kernels.products.most_rows ? 1 : most;
    const std::size_t units = panels * pieces;
    parallel(static_cast<int>(units < most ? units : most), [&](int part, int parts) {
        const Range range = share(units, part, parts);
        std::size_t before = 0;
        for (const Product *one = products; one != products + count; ++one) {
            const Matrix &matrix = *one->matrix;
            const std::size_t last = before + matrix.panels();
            std::size_t unit = range.first > before * pieces ? range.first : before * pieces;
            for (; unit < range.last && unit < last * pieces; ++unit) {
                const std::size_t panel = unit / pieces - before, column = panel * panel_columns;
                const Range own = share(x.rows, static_cast<int>(unit % pieces), static_cast<int>(pieces));
                each_tile(kernels, matrix, panel, ready, own, [&](std::size_t row, const float *sums) {
                    kernels.rows.finish(
                        one->out.type, sums, matrix.scales ? matrix.scales + column : nullptr,
                        ready.scales ? ready.scales[row] : 1.0f, one->bias ? one->bias + column : nullptr,
                        static_cast<char *>(one->out.row(row)) + column * bytes_of(one->out.type), matrix.width(panel));
                });
            }
            before = last;
        }
    });
}

void linear(const Kernels &kernels, const Input &x, const Matrix &matrix, const float *bias, const Output &out) {
    const Product one{&matrix, bias, out};
    linear(kernels, x, &one, 1);
}

namespace {

// Depth elements of a range as a matrix of its own, of which this panel may be read: within a panel depth runs
// outside, so the range is one piece of it.
Matrix depths_of(const Matrix &whole, Range range, std::size_t panel) {
    Matrix part = whole;
    part.depth = range.last - range.first;
    const std::size_t before = panel * panel_columns * (whole.depth - part.depth) + whole.width(panel) * range.first;
    part.data += before * element_bytes(whole.format);
    return part;
}

// Bytes of an element of prepared rows.
std::size_t prepared_bytes(Format format) { return format == Format::i8 ? 1 : format == Format::bf16 ? 2 : 4; }

}  // namespace

void linear_sums(const Kernels &kernels, const Input &x, const Matrix &matrix, const Range *ranges, std::size_t count,
                 const float *largest, float *out) {
    if (!x.rows || !count) return;
    Scratch::Scope scratch;
    const void **rows = scratch.take<const void *>(x.rows);
    for (std::size_t i = 0; i < x.rows; ++i) rows[i] = x.row(i);
    const Prepared ready = prepare(kernels, x.type, rows, x.rows, matrix, scratch, largest);
    const void **from = scratch.take<const void *>(count * x.rows);
    const std::int32_t **sums = ready.sums ? scratch.take<const std::int32_t *>(count * x.rows) : nullptr;
    const std::size_t bytes = prepared_bytes(matrix.format);
    for (std::size_t p = 0; p < count; ++p)
        for (std::size_t i = 0; i < x.rows; ++i) {
            from[p * x.rows + i] = static_cast<const char *>(ready.x[i]) + ranges[p].first * bytes;
            if (sums) sums[p * x.rows + i] = ready.sums[i] + ranges[p].first / matrix.segment;
        }
    const std::size_t panels = matrix.panels(), units = count * panels, most = static_cast<std::size_t>(threads());
    parallel(static_cast<int>(units < most ? units : most), [&](int part, int parts) {
        const Range own = share(units, part, parts);
        for (std::size_t unit = own.first; unit < own.last; ++unit) {
            const std::size_t p = unit / panels, panel = unit % panels;
            const Matrix depths = depths_of(matrix, ranges[p], panel);
            const Prepared piece{from + p * x.rows, sums ? sums + p * x.rows : nullptr, nullptr};
            each_tile(kernels, depths, panel, piece, Range{0, x.rows}, [&](std::size_t row, const float *found) {
                std::memcpy(out + (p * x.rows + row) * matrix.columns + panel * panel_columns, found,
                            matrix.width(panel) * sizeof(float));
            });
        }
    });
}

void linear_finish(const Kernels &kernels, const float *sums, std::size_t rows, const Matrix &matrix,
                   const float *largest, const float *bias, const Output &out) {
    for (std::size_t i = 0; i < rows; ++i) {
        float scale = 1.0f;
        // As `quantise` does.
        if (matrix.scales)
            scale = (float_to_bits(largest[i]) & 0x7fffffffu) >= 0x7f800000u ? bits_to_float(0x7fc00000u)
                                                                             : largest[i] / 127.0f;
        kernels.rows.finish(out.type, sums + i * matrix.columns, matrix.scales, scale, bias, out.row(i),
                            matrix.columns);
    }
}

}  // namespace adapt

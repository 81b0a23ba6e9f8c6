#include "matrix.h"

#include <vector>

#include "pool.h"

namespace adapt {

namespace {

// f(k, size, data) for each run of a column's depth elements that lie side by side: at data, counted in elements.
template <class F>
void each_run(const Matrix &matrix, std::size_t column, F &&f) {
    const std::size_t panel = column / panel_columns, within = column % panel_columns;
    const std::size_t width = matrix.width(panel), group = group_of(matrix.format);
    std::size_t start = panel * panel_columns * matrix.depth;
    for (std::size_t begin = 0; begin < matrix.depth; begin += matrix.segment) {
        const std::size_t end = begin + matrix.segment < matrix.depth ? begin + matrix.segment : matrix.depth;
        for (std::size_t k = begin; k < end; k += group) {
            const std::size_t size = end - k < group ? end - k : group;
            f(k, size, start + within * size);
            start += width * size;
        }
    }
}

// The usual group is copied as one number.
template <class T, std::size_t group>
void copy(T *to, const T *from, std::size_t size) {
    if (size == group)
        std::memcpy(to, from, group * sizeof(T));
    else
        std::memcpy(to, from, size * sizeof(T));
}

template <class T, std::size_t group>
void pack_column(const Matrix &matrix, std::size_t column, const T *source, T *packed) {
    each_run(matrix, column,
             [&](std::size_t k, std::size_t size, std::size_t at) { copy<T, group>(packed + at, source + k, size); });
}

template <class T, std::size_t group>
void unpack_column(const Matrix &matrix, std::size_t column, T *out) {
    const T *data = reinterpret_cast<const T *>(matrix.data);
    each_run(matrix, column,
             [&](std::size_t k, std::size_t size, std::size_t at) { copy<T, group>(out + k, data + at, size); });
}

void quantise_column(const Matrix &matrix, std::size_t column, const float *source, unsigned char *packed,
                     float *scales, unsigned char *bytes, float elsewhere) {
    std::uint32_t magnitude = float_to_bits(elsewhere) & 0x7fffffffu;
    for (std::size_t k = 0; k < matrix.depth; ++k) {
        const std::uint32_t own = float_to_bits(source[k]) & 0x7fffffffu;
        magnitude = own > magnitude ? own : magnitude;
    }
    const float largest = bits_to_float(magnitude);
    scales[column] = largest / 127.0f;
    // The reciprocal of a subnormal number could be infinite: such a column is zero.
    const float inverse = largest >= 1.17549435e-38f ? 127.0f / largest : 0.0f;
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    for (std::size_t k = 0; k < matrix.depth; ++k)
        bytes[k] = static_cast<unsigned char>(float_to_bits(source[k] * inverse + magic) - 0x4b400000u + 128u);
    pack_column<unsigned char, 4>(matrix, column, bytes, packed);
}

void dequantise_column(const Matrix &matrix, std::size_t column, float *out) {
    each_run(matrix, column, [&](std::size_t k, std::size_t size, std::size_t at) {
        for (std::size_t i = 0; i < size; ++i)
            out[k + i] = (static_cast<float>(matrix.data[at + i]) - 128.0f) * matrix.scales[column];
    });
}

}  // namespace

void pack(const Matrix &matrix, const void *source, std::size_t stride, unsigned char *packed, float *scales,
          const float *largest) {
    parallel(threads(), [&](int part, int parts) {
        // Whole panels, so that no two threads write into one cache line.
        const Range range = share(matrix.panels(), part, parts);
        const std::size_t last = range.last * panel_columns;
        std::vector<unsigned char> bytes(matrix.format == Format::i8 ? matrix.depth : 0);
        for (std::size_t c = range.first * panel_columns; c < matrix.columns && c < last; ++c) {
            const float *wide = static_cast<const float *>(source) + c * stride;
            const std::uint16_t *half = static_cast<const std::uint16_t *>(source) + c * stride;
            switch (matrix.format) {
                case Format::f32:
                    pack_column<float, 1>(matrix, c, wide, reinterpret_cast<float *>(packed));
                    break;
                case Format::bf16:
                    pack_column<std::uint16_t, 2>(matrix, c, half, reinterpret_cast<std::uint16_t *>(packed));
                    break;
                case Format::f16:
                    pack_column<std::uint16_t, 1>(matrix, c, half, reinterpret_cast<std::uint16_t *>(packed));
                    break;
                case Format::i8:
                    quantise_column(matrix, c, wide, packed, scales, bytes.data(), largest ? largest[c] : 0.0f);
            }
        }
    });
}

void unpack(const Matrix &matrix, const std::int64_t *ids, std::size_t count, void *out, std::size_t stride) {
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t column = ids ? static_cast<std::size_t>(ids[i]) : i;
        float *wide = static_cast<float *>(out) + i * stride;
        std::uint16_t *half = static_cast<std::uint16_t *>(out) + i * stride;
        switch (matrix.format) {
            case Format::f32:
                unpack_column<float, 1>(matrix, column, wide);
                break;
            case Format::bf16:
                unpack_column<std::uint16_t, 2>(matrix, column, half);
                break;
            case Format::f16:
                unpack_column<std::uint16_t, 1>(matrix, column, half);
                break;
            case Format::i8:
                dequantise_column(matrix, column, wide);
        }
    }
}

}  // namespace adapt

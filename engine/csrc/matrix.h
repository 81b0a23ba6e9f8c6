// A weight matrix [columns, depth] in the order in which kernels read it.
//
// The order of accumulation belongs to the matrix, not to a kernel: depth is cut into segments; within a segment
// products are added in order of depth, from zero (bfloat16: of each pair the second one first); segments are added
// along a balanced tree that splits at the largest power of two below their number. Every kernel, number of rows and
// number of threads gives these sums, and so do ranks that hold whole subtrees.
//
// Columns (outputs) are cut into panels of 64. Within a panel, depth runs outside: for each group of as many
// consecutive depth elements as one multiply-add instruction takes (`group_of`), those of every column of the panel. A
// segment that is not a multiple of the group ends with the remaining elements of every column. There is no padding:
// the matrix takes the bytes that it takes in any other order, and a panel is one stream of memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.h"

namespace adapt {

enum class Format { f32, bf16, f16, i8 };

constexpr std::size_t panel_columns = 64;

inline std::size_t element_bytes(Format format) { return format == Format::f32 ? 4 : format == Format::i8 ? 1 : 2; }

inline std::size_t group_of(Format format) { return format == Format::bf16 ? 2 : format == Format::i8 ? 4 : 1; }

struct Matrix {
    Format format;
    std::size_t columns, depth;
    // Depth elements of a canonical segment, at least 1; the last segment may be shorter.
    std::size_t segment;
    const unsigned char *data;
    // Of int8: an element is (byte - 128) * scale of its column. Null otherwise.
    const float *scales;

    std::size_t segments() const { return depth ? (depth + segment - 1) / segment : 1; }
    std::size_t panels() const { return (columns + panel_columns - 1) / panel_columns; }
    std::size_t width(std::size_t panel) const {
        const std::size_t left = columns - panel * panel_columns;
        return left < panel_columns ? left : panel_columns;
    }
    std::size_t panel_offset(std::size_t panel) const { return panel * panel_columns * depth * element_bytes(format); }
};

// Write ``source`` (rows of ``stride`` elements, one a column of the matrix, of the matrix's own format; int8 from
// float32) into packed order. ``scales`` receives those of int8, computed from the largest magnitude of each column; of
// a column that is a part of a longer one, ``largest`` is that elsewhere in it (null where none is).
void pack(const Matrix &matrix, const void *source, std::size_t stride, unsigned char *packed, float *scales,
          const float *largest = nullptr);

// The opposite: column ``ids[i]`` (all columns in order where null) to row i of ``out``.
void unpack(const Matrix &matrix, const std::int64_t *ids, std::size_t count, void *out, std::size_t stride);

}  // namespace adapt

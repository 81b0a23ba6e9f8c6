// Products of rows with a packed matrix: one tile of some rows by one panel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matrix.h"

namespace adapt {

// Of any instruction set.
constexpr std::size_t most_tile_rows = 12;

// Sums of a tile, before scales, bias and rounding: float [rows][panel_columns].
//   x: one pointer a row, to what the matrix's format multiplies with: bfloat16 for bf16, float32 for f32 and f16,
//      int8 for i8.
//   turn, turns: this is the turn'th of so many tiles that are computed one after the other with the same panel.
//   sums: of i8, one pointer a row to the sum of x over each segment; else null.
struct ProductKernels {
    // Rows of one tile at most; and where there are more rows than that, of each of the tiles.
    std::size_t most_rows, block_rows;
    void (*tile)(const Matrix &matrix, std::size_t panel, const void *const *x, const std::int32_t *const *sums,
                 std::size_t rows, std::size_t turn, std::size_t turns, float *out);
    // Into packed order: ``units`` pieces of ``unit`` bytes of each of sixteen rows, those of one place side by side,
    // places ``step`` bytes apart.
    void (*transpose)(const void *const *rows, std::size_t unit, std::size_t units, unsigned char *out,
                      std::size_t step);
    // Elements of two rows of 16-bit numbers by turns.
    void (*interleave)(const void *a, const void *b, std::size_t width, unsigned char *out);
    // What the machine can do at most: multiply-adds of a format on full registers, ``rounds`` times a whole tile
    // without memory (returns operations, two for each multiply-add), and reading. Both return a value that depends on
    // everything, so that nothing can be left out.
    double (*multiply)(Format format, std::size_t rounds, float *result);
    float (*read)(const void *data, std::size_t bytes);
};

ProductKernels scalar_products();
ProductKernels avx2_products();
ProductKernels avx512_products();

}  // namespace adapt

// Products of rows with a packed matrix: one tile of at most `rows` rows by one panel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matrix.h"

namespace adapt {

// Sums of a tile, before scales, bias and rounding: float [rows][panel_columns].
//   x: one pointer a row, to what the matrix's format multiplies with: bfloat16 for bf16, float32 for f32 and f16,
//      int8 for i8.
//   sums: of i8, one pointer a row to the sum of x over each segment; else null.
struct ProductKernels {
    std::size_t rows;
    void (*tile)(const Matrix &matrix, std::size_t panel, const void *const *x, const std::int32_t *const *sums,
                 std::size_t rows, float *out);
};

ProductKernels scalar_products();
ProductKernels avx2_products();
ProductKernels avx512_products();

}  // namespace adapt

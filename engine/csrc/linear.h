// What ops that multiply with packed matrices share.
#pragma once

#include "ops.h"
#include "pool.h"
#include "scratch.h"

namespace adapt {

// Rows as a matrix's format multiplies them: one pointer a row, and of int8 its sums and its scale.
struct Prepared {
    const void *const *x;
    const std::int32_t *const *sums;
    const float *scales;
};

// ``rows`` [count] of ``type``, valid while ``scratch`` is.
// ``largest``: of each row, the largest magnitude elsewhere in it, where a row is a part of a longer one; or null.
Prepared prepare(const Kernels &kernels, Type type, const void *const *rows, std::size_t count, const Matrix &matrix,
                 Scratch::Scope &scratch, const float *largest = nullptr);

// Tiles that so many rows are cut into.
inline std::size_t tiles_of(const Kernels &kernels, std::size_t rows) {
    const std::size_t block = kernels.products.block_rows;
    return rows <= kernels.products.most_rows ? 1 : (rows + block - 1) / block;
}

// f(row, sums) for every row of a range: its sums [width of the panel].
template <class F>
void each_tile(const Kernels &kernels, const Matrix &matrix, std::size_t panel, const Prepared &ready, Range range,
               F &&f) {
    alignas(64) float sums[most_tile_rows * panel_columns];
    const std::size_t count = range.last - range.first;
    if (!count) return;
    const std::size_t tiles = tiles_of(kernels, count);
    for (std::size_t t = 0; t < tiles; ++t) {
        const Range tile = share(count, static_cast<int>(t), static_cast<int>(tiles));
        const std::size_t first = range.first + tile.first, rows = tile.last - tile.first;
        kernels.products.tile(matrix, panel, ready.x + first, ready.sums ? ready.sums + first : nullptr, rows, t, tiles,
                              sums);
        for (std::size_t r = 0; r < rows; ++r) f(first + r, sums + r * panel_columns);
    }
}

}  // namespace adapt

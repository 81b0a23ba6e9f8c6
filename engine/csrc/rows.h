// Row kernels: every function treats one row, so that a row's bits never depend on its neighbours.
#pragma once

#include <cstddef>

#include "types.h"

namespace adapt {

// out = (x / sqrt(mean(x^2) + eps), rounded to the row's type) * weight, rounded again; sums in float32.
// silu(gate) * up in float32, rounded once.
// Pairs (x[i], x[i + half]) turned by the angles whose cosines and sines are given, in float32, rounded once.
struct RowKernels {
    void (*rms_norm)(Type type, const void *x, const void *weight, void *out, std::size_t width, float eps);
    void (*swiglu)(Type type, const void *gate, const void *up, void *out, std::size_t width);
    void (*rotate)(Type type, const void *x, const float *cosines, const float *sines, void *out, std::size_t half);
    // Sums of a product to elements of ``type``: times scale and scales (of int8; null otherwise), plus bias (or null).
    void (*finish)(Type type, const float *sums, const float *scales, float scale, const float *bias, void *out,
                   std::size_t width);
    // silu(gate) * up of the sums of two products, each finished and rounded first: the bits of finish and swiglu.
    void (*gated)(Type type, const float *gate, const float *up, const float *gate_scales, const float *up_scales,
                  float scale, void *out, std::size_t width);
    void (*widen)(Type type, const void *x, float *out, std::size_t width);
    // To int8, symmetric, by the largest magnitude of the row; returns the scale (NaN where a value is not finite).
    // sums: of each segment; wide: scratch for the row; least: largest magnitude elsewhere in a row of which this is a
    // part, 0 where it is the whole.
    float (*quantise)(Type type, const void *x, float *wide, std::int8_t *out, std::int32_t *sums, std::size_t width,
                      std::size_t segment, float least);
    // Sum of rows times weights in float32, in their order, rounded once.
    void (*combine)(Type type, const void *const *rows, const float *weights, std::size_t count, void *out,
                    std::size_t width);
    void (*add)(Type type, const void *a, const void *b, void *out, std::size_t width);
    // Of float32 logits; NaN or infinity anywhere makes a softmax row NaN.
    void (*softmax)(const float *logits, float *out, std::size_t width);
    void (*sigmoid)(const float *logits, float *out, std::size_t width);
    // Index of the largest, the lowest among equals; -1 where one is not finite.
    std::int64_t (*greedy)(const float *logits, std::size_t width);
    // Attention. Scores of keys [low, high) times scale, in pieces of 64 that lie ``stride`` apart: their largest, the
    // exponentials against it as ``type`` [depth] with zeros for all other keys, and the sum of those. Spoils scores.
    void (*shares)(Type type, float *scores, std::size_t stride, std::size_t low, std::size_t high, std::size_t depth,
                   float scale, void *out, float *largest, float *sum);
    // Two parts of a softmax-weighted sum become one, on the right.
    void (*merge)(const float *largest, const float *sum, const float *mixed, float *right_largest, float *right_sum,
                  float *right_mixed, std::size_t width);
    // mixed / sum, or zeros where sum is 0.
    void (*divide)(Type type, const float *mixed, float sum, void *out, std::size_t width);
};

RowKernels scalar_kernels();
RowKernels avx2_kernels();
RowKernels avx512_kernels();

}  // namespace adapt

// Row kernels: every function treats one row, so that a row's bits never depend on its neighbours.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace adapt {

enum class Type { f32, bf16, f16 };

// out = (x / sqrt(mean(x^2) + eps), rounded to the row's type) * weight, rounded again; sums in float32.
// silu(gate) * up in float32, rounded once.
// Pairs (x[i], x[i + half]) turned by the angles whose cosines and sines are given, in float32, rounded once.
struct RowKernels {
    void (*rms_norm)(Type type, const void *x, const void *weight, void *out, std::size_t width, float eps);
    void (*swiglu)(Type type, const void *gate, const void *up, void *out, std::size_t width);
    void (*rotate)(Type type, const void *x, const float *cosines, const float *sines, void *out, std::size_t half);
};

RowKernels scalar_kernels();
RowKernels avx2_kernels();
RowKernels avx512_kernels();

inline float bits_to_float(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline std::uint32_t float_to_bits(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

}  // namespace adapt

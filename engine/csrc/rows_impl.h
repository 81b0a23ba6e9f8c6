// The row kernels once, over a vector type V that each translation unit supplies:
//   width, zero, set, load<T>, store<T>, round<T>, + * /, negated, sum, exp; load_tail and store_tail treat the last
//   n < width elements of a row.
// Everything has internal linkage: the same names exist under other instruction sets in other files.
#pragma once

#include <cmath>

#include "rows.h"

namespace adapt {
namespace {

template <class V, class T>
void rms_norm_row(const T *x, const T *weight, T *out, std::size_t width, float eps) {
    const std::size_t whole = width / V::width * V::width;
    const std::size_t tail = width - whole;
    V total = V::zero();
    for (std::size_t i = 0; i < whole; i += V::width) {
        const V v = V::template load<T>(x + i);
        total = total + v * v;
    }
    if (tail) {
        const V v = V::template load_tail<T>(x + whole, tail);
        total = total + v * v;
    }
    const float mean = total.sum() / static_cast<float>(width);
    const V scale = V::set(1.0f / std::sqrt(mean + eps));
    for (std::size_t i = 0; i < whole; i += V::width) {
        const V normed = (V::template load<T>(x + i) * scale).template round<T>();
        (V::template load<T>(weight + i) * normed).template store<T>(out + i);
    }
    if (tail) {
        const V normed = (V::template load_tail<T>(x + whole, tail) * scale).template round<T>();
        (V::template load_tail<T>(weight + whole, tail) * normed).template store_tail<T>(out + whole, tail);
    }
}

// exp(x) = 2^n * p(r), n = round(x / ln 2), |r| <= ln 2 / 2; ln 2 in two parts and the degree-5 minimax polynomial
// are those of Cephes' expf (S. Moshier). V supplies clamp, nearest, times_pow2 and multiply-add.
template <class V>
V exp_of(V x) {
    // Beyond 88.73 the result is infinite, as it should be; below -87.3 it would leave the normal numbers.
    x = x.clamp(-87.3f, 89.0f);
    const V n = (x * V::set(1.44269504088896341f)).nearest();
    const V r = V::fma(n, V::set(2.12194440e-4f), V::fma(n, V::set(-0.693359375f), x));
    V p = V::set(1.9875691500e-4f);
    p = V::fma(p, r, V::set(1.3981999507e-3f));
    p = V::fma(p, r, V::set(8.3334519073e-3f));
    p = V::fma(p, r, V::set(4.1665795894e-2f));
    p = V::fma(p, r, V::set(1.6666665459e-1f));
    p = V::fma(p, r, V::set(5.0000001201e-1f));
    p = V::fma(p, r * r, r + V::set(1.0f));
    return p.times_pow2(n);
}

template <class V>
V silu_times(V gate, V up) {
    return gate / (V::set(1.0f) + gate.negated().exp()) * up;
}

template <class V, class T>
void swiglu_row(const T *gate, const T *up, T *out, std::size_t width) {
    const std::size_t whole = width / V::width * V::width;
    const std::size_t tail = width - whole;
    for (std::size_t i = 0; i < whole; i += V::width)
        silu_times(V::template load<T>(gate + i), V::template load<T>(up + i)).template store<T>(out + i);
    if (tail)
        silu_times(V::template load_tail<T>(gate + whole, tail), V::template load_tail<T>(up + whole, tail))
            .template store_tail<T>(out + whole, tail);
}

template <class V>
V turned(V kept, V cosine, V other, V sine) {
    return kept * cosine + other * sine;
}

template <class V, class T>
void rotate_row(const T *x, const float *cosines, const float *sines, T *out, std::size_t half) {
    const std::size_t whole = half / V::width * V::width;
    const std::size_t tail = half - whole;
    for (std::size_t i = 0; i < whole; i += V::width) {
        const V first = V::template load<T>(x + i), second = V::template load<T>(x + half + i);
        const V cosine = V::template load<float>(cosines + i), sine = V::template load<float>(sines + i);
        turned(first, cosine, second.negated(), sine).template store<T>(out + i);
        turned(second, cosine, first, sine).template store<T>(out + half + i);
    }
    if (tail) {
        const V first = V::template load_tail<T>(x + whole, tail),
                second = V::template load_tail<T>(x + half + whole, tail);
        const V cosine = V::template load_tail<float>(cosines + whole, tail);
        const V sine = V::template load_tail<float>(sines + whole, tail);
        turned(first, cosine, second.negated(), sine).template store_tail<T>(out + whole, tail);
        turned(second, cosine, first, sine).template store_tail<T>(out + half + whole, tail);
    }
}

struct BF16 {
    std::uint16_t bits;
};
struct F16 {
    std::uint16_t bits;
};

template <class V>
void rms_norm_any(Type type, const void *x, const void *weight, void *out, std::size_t width, float eps) {
    switch (type) {
        case Type::f32:
            return rms_norm_row<V, float>(static_cast<const float *>(x), static_cast<const float *>(weight),
                                          static_cast<float *>(out), width, eps);
        case Type::bf16:
            return rms_norm_row<V, BF16>(static_cast<const BF16 *>(x), static_cast<const BF16 *>(weight),
                                         static_cast<BF16 *>(out), width, eps);
        case Type::f16:
            return rms_norm_row<V, F16>(static_cast<const F16 *>(x), static_cast<const F16 *>(weight),
                                        static_cast<F16 *>(out), width, eps);
    }
}

template <class V>
void swiglu_any(Type type, const void *gate, const void *up, void *out, std::size_t width) {
    switch (type) {
        case Type::f32:
            return swiglu_row<V, float>(static_cast<const float *>(gate), static_cast<const float *>(up),
                                        static_cast<float *>(out), width);
        case Type::bf16:
            return swiglu_row<V, BF16>(static_cast<const BF16 *>(gate), static_cast<const BF16 *>(up),
                                       static_cast<BF16 *>(out), width);
        case Type::f16:
            return swiglu_row<V, F16>(static_cast<const F16 *>(gate), static_cast<const F16 *>(up),
                                      static_cast<F16 *>(out), width);
    }
}

template <class V>
void rotate_any(Type type, const void *x, const float *cosines, const float *sines, void *out, std::size_t half) {
    switch (type) {
        case Type::f32:
            return rotate_row<V, float>(static_cast<const float *>(x), cosines, sines, static_cast<float *>(out), half);
        case Type::bf16:
            return rotate_row<V, BF16>(static_cast<const BF16 *>(x), cosines, sines, static_cast<BF16 *>(out), half);
        case Type::f16:
            return rotate_row<V, F16>(static_cast<const F16 *>(x), cosines, sines, static_cast<F16 *>(out), half);
    }
}

template <class V>
RowKernels kernels_over() {
    return RowKernels{&rms_norm_any<V>, &swiglu_any<V>, &rotate_any<V>};
}

// bfloat16: the upper half of a float32; round to nearest even, NaN stays NaN.
inline float from_bf16(BF16 value) { return bits_to_float(static_cast<std::uint32_t>(value.bits) << 16); }

inline BF16 to_bf16(float value) {
    const std::uint32_t bits = float_to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return BF16{static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
    return BF16{static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

}  // namespace
}  // namespace adapt

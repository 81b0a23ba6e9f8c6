// Eight lanes: AVX2 with F16C. Tails go through a padded copy.
#include <immintrin.h>

#include "rows_impl.h"

namespace adapt {
namespace {

struct Avx2 {
    static constexpr std::size_t width = 8;
    __m256 value;

    static Avx2 zero() { return {_mm256_setzero_ps()}; }
    static Avx2 set(float v) { return {_mm256_set1_ps(v)}; }
    template <class T>
    static Avx2 load(const T *p);
    template <class T>
    static Avx2 load_tail(const T *p, std::size_t n) {
        T padded[width] = {};
        std::memcpy(padded, p, n * sizeof(T));
        return load<T>(padded);
    }
    template <class T>
    void store(T *p) const;
    template <class T>
    void store_tail(T *p, std::size_t n) const {
        T padded[width];
        store<T>(padded);
        std::memcpy(p, padded, n * sizeof(T));
    }
    template <class T>
    Avx2 round() const {
        T kept[width];
        store<T>(kept);
        return load<T>(kept);
    }
    float sum() const {
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
    }
    Avx2 negated() const { return {_mm256_xor_ps(value, _mm256_set1_ps(-0.0f))}; }
    Avx2 exp() const { return exp_of(*this); }
    // Operand order matters: min and max give their second operand where one is NaN, and NaN must survive.
    Avx2 clamp(float low, float high) const {
        return {_mm256_max_ps(_mm256_set1_ps(low), _mm256_min_ps(_mm256_set1_ps(high), value))};
    }
    static Avx2 larger(Avx2 a, Avx2 b) { return {_mm256_max_ps(a.value, b.value)}; }
    Avx2 nearest() const { return {_mm256_round_ps(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    static __m256 pow2(__m256i n) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
    }
    // In two halves: 2^128 is no float32, but its product with the value may be.
    Avx2 times_pow2(Avx2 n) const {
        const __m256i whole = _mm256_cvtps_epi32(n.value);
        const __m256i half = _mm256_srai_epi32(whole, 1);
        return {_mm256_mul_ps(_mm256_mul_ps(value, pow2(half)), pow2(_mm256_sub_epi32(whole, half)))};
    }
    static Avx2 fma(Avx2 a, Avx2 b, Avx2 c) { return {_mm256_fmadd_ps(a.value, b.value, c.value)}; }
    friend Avx2 operator/(Avx2 a, Avx2 b) { return {_mm256_div_ps(a.value, b.value)}; }
    friend Avx2 operator+(Avx2 a, Avx2 b) { return {_mm256_add_ps(a.value, b.value)}; }
    friend Avx2 operator*(Avx2 a, Avx2 b) { return {_mm256_mul_ps(a.value, b.value)}; }
};

template <>
ADAPT_INLINE Avx2 Avx2::load<float>(const float *p) {
    return {_mm256_loadu_ps(p)};
}
template <>
ADAPT_INLINE Avx2 Avx2::load<BF16>(const BF16 *p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16))};
}
template <>
ADAPT_INLINE Avx2 Avx2::load<F16>(const F16 *p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))};
}
template <>
ADAPT_INLINE void Avx2::store<float>(float *p) const {
    _mm256_storeu_ps(p, value);
}
template <>
ADAPT_INLINE void Avx2::store<BF16>(BF16 *p) const {
    alignas(32) float lanes[width];
    _mm256_store_ps(lanes, value);
    for (std::size_t i = 0; i < width; ++i) p[i] = to_bf16(lanes[i]);
}
template <>
ADAPT_INLINE void Avx2::store<F16>(F16 *p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p),
                     _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

}  // namespace

RowKernels avx2_kernels() { return kernels_over<Avx2>(); }

}  // namespace adapt

// Sixteen lanes: AVX-512 F, BW, VL, DQ. Tails are masked, so nothing outside the row is touched.
#include <immintrin.h>

#include "rows_impl.h"

namespace adapt {
namespace {

struct Avx512 {
    static constexpr std::size_t width = 16;
    __m512 value;

    static Avx512 zero() { return {_mm512_setzero_ps()}; }
    static Avx512 set(float v) { return {_mm512_set1_ps(v)}; }
    static __mmask16 first(std::size_t n) { return static_cast<__mmask16>((1u << n) - 1u); }
    template <class T>
    static Avx512 load(const T *p);
    template <class T>
    static Avx512 load_tail(const T *p, std::size_t n);
    template <class T>
    void store(T *p) const;
    template <class T>
    void store_tail(T *p, std::size_t n) const;
    template <class T>
    Avx512 round() const;
    float sum() const { return _mm512_reduce_add_ps(value); }
    Avx512 negated() const { return {_mm512_xor_ps(value, _mm512_set1_ps(-0.0f))}; }
    Avx512 exp() const { return exp_of(*this); }
    // Operand order matters: min and max give their second operand where one is NaN, and NaN must survive.
    Avx512 clamp(float low, float high) const {
        return {_mm512_max_ps(_mm512_set1_ps(low), _mm512_min_ps(_mm512_set1_ps(high), value))};
    }
    static Avx512 larger(Avx512 a, Avx512 b) { return {_mm512_max_ps(a.value, b.value)}; }
    Avx512 nearest() const { return {_mm512_roundscale_ps(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    Avx512 times_pow2(Avx512 n) const { return {_mm512_scalef_ps(value, n.value)}; }
    static Avx512 fma(Avx512 a, Avx512 b, Avx512 c) { return {_mm512_fmadd_ps(a.value, b.value, c.value)}; }
    friend Avx512 operator/(Avx512 a, Avx512 b) { return {_mm512_div_ps(a.value, b.value)}; }
    friend Avx512 operator+(Avx512 a, Avx512 b) { return {_mm512_add_ps(a.value, b.value)}; }
    friend Avx512 operator*(Avx512 a, Avx512 b) { return {_mm512_mul_ps(a.value, b.value)}; }
};

ADAPT_INLINE Avx512 widen_bf16(__m256i raw) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}

ADAPT_INLINE __m256i narrow_bf16(__m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet));
}

ADAPT_INLINE __m256i narrow_f16(__m512 value) {
    return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

ADAPT_INLINE __m256i half_at(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
ADAPT_INLINE void put_half(void *p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i *>(p), v); }

template <>
ADAPT_INLINE Avx512 Avx512::load<float>(const float *p) {
    return {_mm512_loadu_ps(p)};
}
template <>
ADAPT_INLINE Avx512 Avx512::load<BF16>(const BF16 *p) {
    return widen_bf16(half_at(p));
}
template <>
ADAPT_INLINE Avx512 Avx512::load<F16>(const F16 *p) {
    return {_mm512_cvtph_ps(half_at(p))};
}
template <>
ADAPT_INLINE void Avx512::store<float>(float *p) const {
    _mm512_storeu_ps(p, value);
}
template <>
ADAPT_INLINE void Avx512::store<BF16>(BF16 *p) const {
    put_half(p, narrow_bf16(value));
}
template <>
ADAPT_INLINE void Avx512::store<F16>(F16 *p) const {
    put_half(p, narrow_f16(value));
}
template <>
ADAPT_INLINE Avx512 Avx512::load_tail<float>(const float *p, std::size_t n) {
    return {_mm512_maskz_loadu_ps(first(n), p)};
}
template <>
ADAPT_INLINE Avx512 Avx512::load_tail<BF16>(const BF16 *p, std::size_t n) {
    return widen_bf16(_mm256_maskz_loadu_epi16(first(n), p));
}
template <>
ADAPT_INLINE Avx512 Avx512::load_tail<F16>(const F16 *p, std::size_t n) {
    return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p))};
}
template <>
ADAPT_INLINE void Avx512::store_tail<float>(float *p, std::size_t n) const {
    _mm512_mask_storeu_ps(p, first(n), value);
}
template <>
ADAPT_INLINE void Avx512::store_tail<BF16>(BF16 *p, std::size_t n) const {
    _mm256_mask_storeu_epi16(p, first(n), narrow_bf16(value));
}
template <>
ADAPT_INLINE void Avx512::store_tail<F16>(F16 *p, std::size_t n) const {
    _mm256_mask_storeu_epi16(p, first(n), narrow_f16(value));
}
template <>
ADAPT_INLINE Avx512 Avx512::round<float>() const {
    return *this;
}
template <>
ADAPT_INLINE Avx512 Avx512::round<BF16>() const {
    return widen_bf16(narrow_bf16(value));
}
template <>
ADAPT_INLINE Avx512 Avx512::round<F16>() const {
    return {_mm512_cvtph_ps(narrow_f16(value))};
}

}  // namespace

RowKernels avx512_kernels() { return kernels_over<Avx512>(); }

}  // namespace adapt

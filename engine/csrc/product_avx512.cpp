// Sixteen columns a register: AVX-512 with BF16 and VNNI. What is beyond the last column is masked, never touched.
#include <immintrin.h>

#include "product_impl.h"

namespace adapt {
namespace {

__mmask16 first(std::size_t n) { return static_cast<__mmask16>((1u << n) - 1u); }

struct Avx512 {
    using Float = __m512;
    static constexpr int most_rows = 12, block_rows = 6, most_sums = 24;
    static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
    static Float load(const float *p) { return _mm512_load_ps(p); }
    static void store(float *p, Float v) { _mm512_store_ps(p, v); }

    // Four rounds of exchanges, at distances 1, 2, 4 and 8.
    static void transpose(const void *const *rows, std::size_t offset, unsigned char *out, std::size_t step) {
        __m512i a[16], b[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(static_cast<const char *>(rows[i]) + offset);
#pragma GCC unroll 8
        for (int i = 0; i < 16; i += 2) {
            b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 4) {
            a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
            a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
            a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
            a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
        }
        // a[4 r + c] has, in its lane l of 128 bits, number 4 l + c of rows 4 r to 4 r + 3.
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            b[c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
            b[4 + c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
            b[8 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
            b[12 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        }
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            a[c] = _mm512_shuffle_i32x4(b[c], b[8 + c], 0x88);
            a[8 + c] = _mm512_shuffle_i32x4(b[c], b[8 + c], 0xdd);
            a[4 + c] = _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0x88);
            a[12 + c] = _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0xdd);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * step, a[i]);
    }
    static void interleave(const unsigned char *a, const unsigned char *b, unsigned char *out) {
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(a)));
        const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(b)));
        _mm512_storeu_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }

    struct Floating {
        using Sum = __m512;
        static Sum begin(const std::int32_t *, std::size_t) { return _mm512_setzero_ps(); }
        static __m512 value(Sum sum) { return sum; }
    };

    // float32 elements and activations; also what half precision widens to.
    struct F32 : Floating {
        using Raw = __m512;
        static constexpr std::size_t group = 1, bytes = 4;
        template <bool part>
        static Raw load(const unsigned char *p, std::size_t columns) {
            return part ? _mm512_maskz_loadu_ps(first(columns), p) : _mm512_loadu_ps(p);
        }
        static __m512 spread(const void *x, std::size_t k) { return _mm512_set1_ps(static_cast<const float *>(x)[k]); }
        static Sum dot(Sum sum, Raw raw, __m512 x) { return _mm512_fmadd_ps(raw, x, sum); }
        static Raw load_tail(const unsigned char *, std::size_t, std::size_t) { return _mm512_setzero_ps(); }
        static __m512 spread_tail(const void *, std::size_t, std::size_t) { return _mm512_setzero_ps(); }
    };

    struct F16 : F32 {
        static constexpr std::size_t bytes = 2;
        template <bool part>
        static Raw load(const unsigned char *p, std::size_t columns) {
            return _mm512_cvtph_ps(part ? _mm256_maskz_loadu_epi16(first(columns), p)
                                        : _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
        }
    };

    struct BF16 : Floating {
        using Raw = __m512i;
        static constexpr std::size_t group = 2, bytes = 2;
        template <bool part>
        static Raw load(const unsigned char *p, std::size_t columns) {
            return part ? _mm512_maskz_loadu_epi32(first(columns), p) : _mm512_loadu_si512(p);
        }
        static __m512i spread(const void *x, std::size_t k) {
            std::int32_t pair;
            std::memcpy(&pair, static_cast<const std::uint16_t *>(x) + k, sizeof pair);
            return _mm512_set1_epi32(pair);
        }
        static Sum dot(Sum sum, Raw raw, __m512i x) { return _mm512_dpbf16_ps(sum, (__m512bh)raw, (__m512bh)x); }
        static Raw load_tail(const unsigned char *p, std::size_t, std::size_t columns) {
            return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(columns), p));
        }
        static __m512i spread_tail(const void *x, std::size_t k, std::size_t) {
            return _mm512_set1_epi32(static_cast<const std::uint16_t *>(x)[k]);
        }
    };

    // Elements are bytes offset by 128, which the sums of x take out again.
    struct I8 {
        using Sum = __m512i;
        using Raw = __m512i;
        static constexpr std::size_t group = 4, bytes = 1;
        static Sum begin(const std::int32_t *sums, std::size_t segment) {
            return _mm512_set1_epi32(-128 * sums[segment]);
        }
        static __m512 value(Sum sum) { return _mm512_cvtepi32_ps(sum); }
        template <bool part>
        static Raw load(const unsigned char *p, std::size_t columns) {
            return part ? _mm512_maskz_loadu_epi32(first(columns), p) : _mm512_loadu_si512(p);
        }
        static __m512i spread(const void *x, std::size_t k) {
            std::int32_t four;
            std::memcpy(&four, static_cast<const std::int8_t *>(x) + k, sizeof four);
            return _mm512_set1_epi32(four);
        }
        // In place: GCC 12 copies the sums of the intrinsic around, at a third of the speed.
        static Sum dot(Sum sum, Raw raw, __m512i x) {
            asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(raw), "v"(x));
            return sum;
        }
        static Raw load_tail(const unsigned char *p, std::size_t count, std::size_t columns) {
            alignas(64) unsigned char padded[64] = {};
            for (std::size_t c = 0; c < columns; ++c) std::memcpy(padded + 4 * c, p + c * count, count);
            return _mm512_load_si512(padded);
        }
        static __m512i spread_tail(const void *x, std::size_t k, std::size_t count) {
            std::int32_t four = 0;
            std::memcpy(&four, static_cast<const std::int8_t *>(x) + k, count);
            return _mm512_set1_epi32(four);
        }
    };
};

}  // namespace

ProductKernels avx512_products() { return products_over<Avx512>(); }

}  // namespace adapt

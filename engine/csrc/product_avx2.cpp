// Two registers of eight columns: AVX2 with FMA and F16C. Columns beyond the last one go through a padded copy.
#include <immintrin.h>

#include "product_impl.h"

namespace adapt {
namespace {

struct Avx2 {
    struct Float {
        __m256 low, high;
    };
    struct Whole {
        __m256i low, high;
    };
    static constexpr int most_rows = 4, block_rows = 4, most_sums = 4;
    static Float add(Float a, Float b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
    static Float load(const float *p) { return {_mm256_load_ps(p), _mm256_load_ps(p + 8)}; }
    static void store(float *p, Float v) {
        _mm256_store_ps(p, v.low);
        _mm256_store_ps(p + 8, v.high);
    }
    static __m256i at(const unsigned char *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
    // 64 bytes, of which the first ``size`` are there.
    template <bool part>
    static Whole bytes_at(const unsigned char *p, std::size_t size) {
        if (!part) return {at(p), at(p + 32)};
        alignas(32) unsigned char padded[64] = {};
        std::memcpy(padded, p, size);
        return {at(padded), at(padded + 32)};
    }

    static void transpose(const void *const *rows, std::size_t offset, unsigned char *out, std::size_t step) {
        transpose_plainly(rows, offset, out, step);
    }
    static void interleave(const unsigned char *a, const unsigned char *b, unsigned char *out) {
        for (std::size_t c = 0; c < lanes; ++c) {
            std::memcpy(out + 4 * c, a + 2 * c, 2);
            std::memcpy(out + 4 * c + 2, b + 2 * c, 2);
        }
    }

    struct Floating {
        using Sum = Float;
        static Sum begin(const std::int32_t *, std::size_t) { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
        static Float value(Sum sum) { return sum; }
    };

    struct F32 : Floating {
        using Raw = Float;
        static constexpr std::size_t group = 1, bytes = 4;
        template <bool part>
        static Raw load(const unsigned char *p, std::size_t columns) {
            const Whole raw = bytes_at<part>(p, columns * 4);
            return {_mm256_castsi256_ps(raw.low), _mm256_castsi256_ps(raw.high)};
        }
        static __m256 spread(const void *x, std::size_t k) { return _mm256_set1_ps(static_cast<const float *>(x)[k]); }
        static Sum dot(Sum sum, Raw raw, __m256 x) {
            return {_mm256_fmadd_ps(raw.low, x, sum.low), _mm256_fmadd_ps(raw.high, x, sum.high)};
        }
        static Raw load_tail(const unsigned char *, std::size_t, std::size_t) { return begin(nullptr, 0); }
        static __m256 spread_tail(const void *, std::size_t, std::size_t) { return _mm256_setzero_ps(); }
    };

    struct F16 : F32 {
        static constexpr std::size_t bytes = 2;
        template <bool part>
        static Raw load(const unsigned char *p, std::size_t columns) {
            alignas(16) unsigned char padded[32] = {};
            if (part) std::memcpy(padded, p, columns * 2);
            const __m128i *from = reinterpret_cast<const __m128i *>(part ? padded : p);
            return {_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
        }
    };

    struct BF16 : Floating {
        using Raw = Whole;
        struct Pair {
            __m256 even, odd;
        };
        static constexpr std::size_t group = 2, bytes = 2;
        template <bool part>
        static Raw load(const unsigned char *p, std::size_t columns) {
            return bytes_at<part>(p, columns * 4);
        }
        static float wide(const void *x, std::size_t k) {
            return bits_to_float(static_cast<std::uint32_t>(static_cast<const std::uint16_t *>(x)[k]) << 16);
        }
        static Pair spread(const void *x, std::size_t k) {
            return {_mm256_set1_ps(wide(x, k)), _mm256_set1_ps(wide(x, k + 1))};
        }
        static __m256 both(__m256 sum, __m256i raw, const Pair &x) {
            const __m256i upper = _mm256_set1_epi32(static_cast<std::int32_t>(0xffff0000u));
            sum = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(raw, upper)), x.odd, sum);
            return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(raw, 16)), x.even, sum);
        }
        static Sum dot(Sum sum, Raw raw, const Pair &x) {
            return {both(sum.low, raw.low, x), both(sum.high, raw.high, x)};
        }
        static Raw load_tail(const unsigned char *p, std::size_t, std::size_t columns) {
            alignas(32) unsigned char padded[64] = {};
            for (std::size_t c = 0; c < columns; ++c) std::memcpy(padded + 4 * c, p + 2 * c, 2);
            return {at(padded), at(padded + 32)};
        }
        static Pair spread_tail(const void *x, std::size_t k, std::size_t) {
            return {_mm256_set1_ps(wide(x, k)), _mm256_setzero_ps()};
        }
    };

    struct I8 {
        using Sum = Whole;
        using Raw = Whole;
        // Activations 0 and 2, 1 and 3 of a group, as 16-bit numbers: products of bytes would saturate in fewer.
        struct Quad {
            __m256i even, odd;
        };
        static constexpr std::size_t group = 4, bytes = 1;
        static Sum begin(const std::int32_t *sums, std::size_t segment) {
            const __m256i offset = _mm256_set1_epi32(-128 * sums[segment]);
            return {offset, offset};
        }
        static Float value(Sum sum) { return {_mm256_cvtepi32_ps(sum.low), _mm256_cvtepi32_ps(sum.high)}; }
        template <bool part>
        static Raw load(const unsigned char *p, std::size_t columns) {
            return bytes_at<part>(p, columns * 4);
        }
        static __m256i two(std::int8_t low, std::int8_t high) {
            return _mm256_set1_epi32((static_cast<std::int32_t>(high) * 65536) | (low & 0xffff));
        }
        static Quad spread(const void *x, std::size_t k) { return spread_tail(x, k, 4); }
        static Quad spread_tail(const void *x, std::size_t k, std::size_t count) {
            std::int8_t four[4] = {};
            std::memcpy(four, static_cast<const std::int8_t *>(x) + k, count);
            return {two(four[0], four[2]), two(four[1], four[3])};
        }
        static __m256i four(__m256i sum, __m256i raw, const Quad &x) {
            const __m256i even = _mm256_and_si256(raw, _mm256_set1_epi32(0x00ff00ff)), odd = _mm256_srli_epi16(raw, 8);
            return _mm256_add_epi32(sum,
                                    _mm256_add_epi32(_mm256_madd_epi16(even, x.even), _mm256_madd_epi16(odd, x.odd)));
        }
        static Sum dot(Sum sum, Raw raw, const Quad &x) {
            return {four(sum.low, raw.low, x), four(sum.high, raw.high, x)};
        }
        static Raw load_tail(const unsigned char *p, std::size_t count, std::size_t columns) {
            alignas(32) unsigned char padded[64] = {};
            for (std::size_t c = 0; c < columns; ++c) std::memcpy(padded + 4 * c, p + c * count, count);
            return {at(padded), at(padded + 32)};
        }
    };
};

}  // namespace

ProductKernels avx2_products() { return products_over<Avx2>(); }

}  // namespace adapt

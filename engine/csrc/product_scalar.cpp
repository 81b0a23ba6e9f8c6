// Portable C++: runs anywhere, and the twin that the vector files are tested against.
#include "product_impl.h"

namespace adapt {
namespace {

struct Scalar {
    struct Float {
        float lane[lanes];
    };
    struct Bytes {
        unsigned char byte[64];
    };
    static constexpr int most_rows = 4, block_rows = 4, most_sums = 4;
    static Float add(Float a, const Float &b) {
        for (std::size_t i = 0; i < lanes; ++i) a.lane[i] += b.lane[i];
        return a;
    }
    static Float load(const float *p) {
        Float v;
        std::memcpy(v.lane, p, sizeof v.lane);
        return v;
    }
    static void store(float *p, const Float &v) { std::memcpy(p, v.lane, sizeof v.lane); }

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
        static Sum begin(const std::int32_t *, std::size_t) { return {}; }
        static Float value(const Sum &sum) { return sum; }
    };

    struct F32 : Floating {
        using Raw = Float;
        static constexpr std::size_t group = 1, bytes = 4;
        template <bool part>
        static Raw load(const unsigned char *p, std::size_t columns) {
            Raw raw = {};
            std::memcpy(raw.lane, p, columns * sizeof(float));
            return raw;
        }
        static float spread(const void *x, std::size_t k) { return static_cast<const float *>(x)[k]; }
        static Sum dot(Sum sum, const Raw &raw, float x) {
            for (std::size_t i = 0; i < lanes; ++i) sum.lane[i] += raw.lane[i] * x;
            return sum;
        }
        static Raw load_tail(const unsigned char *, std::size_t, std::size_t) { return {}; }
        static float spread_tail(const void *, std::size_t, std::size_t) { return 0.0f; }
    };

    struct F16 : F32 {
        static constexpr std::size_t bytes = 2;
        template <bool part>
        static Raw load(const unsigned char *p, std::size_t columns) {
            Raw raw = {};
            for (std::size_t i = 0; i < columns; ++i) {
                adapt::F16 half;
                std::memcpy(&half, p + 2 * i, sizeof half);
                raw.lane[i] = from_f16(half);
            }
            return raw;
        }
    };

    struct BF16 : Floating {
        struct Raw {
            float even[lanes], odd[lanes];
        };
        struct Pair {
            float even, odd;
        };
        static constexpr std::size_t group = 2, bytes = 2;
        static float wide(const void *p, std::size_t index) {
            adapt::BF16 value;
            std::memcpy(&value, static_cast<const unsigned char *>(p) + 2 * index, sizeof value);
            return from_bf16(value);
        }
        template <bool part>
        static Raw load(const unsigned char *p, std::size_t columns) {
            Raw raw = {};
            for (std::size_t i = 0; i < columns; ++i) raw.even[i] = wide(p, 2 * i), raw.odd[i] = wide(p, 2 * i + 1);
            return raw;
        }
        static Pair spread(const void *x, std::size_t k) { return {wide(x, k), wide(x, k + 1)}; }
        // A product of two bfloat16 is exact in float32: these are the roundings of a fused multiply-add.
        static Sum dot(Sum sum, const Raw &raw, const Pair &x) {
            for (std::size_t i = 0; i < lanes; ++i) {
                sum.lane[i] += raw.odd[i] * x.odd;
                sum.lane[i] += raw.even[i] * x.even;
            }
            return sum;
        }
        static Raw load_tail(const unsigned char *p, std::size_t, std::size_t columns) {
            Raw raw = {};
            for (std::size_t i = 0; i < columns; ++i) raw.even[i] = wide(p, i);
            return raw;
        }
        static Pair spread_tail(const void *x, std::size_t k, std::size_t) { return {wide(x, k), 0.0f}; }
    };

    struct I8 {
        struct Sum {
            std::int32_t lane[lanes];
        };
        using Raw = Bytes;
        struct Quad {
            std::int8_t x[4];
        };
        static constexpr std::size_t group = 4, bytes = 1;
        static Sum begin(const std::int32_t *sums, std::size_t segment) {
            Sum sum;
            for (std::size_t i = 0; i < lanes; ++i) sum.lane[i] = -128 * sums[segment];
            return sum;
        }
        static Float value(const Sum &sum) {
            Float v;
            for (std::size_t i = 0; i < lanes; ++i) v.lane[i] = static_cast<float>(sum.lane[i]);
            return v;
        }
        template <bool part>
        static Raw load(const unsigned char *p, std::size_t columns) {
            Raw raw = {};
            std::memcpy(raw.byte, p, columns * 4);
            return raw;
        }
        static Quad spread(const void *x, std::size_t k) { return spread_tail(x, k, 4); }
        static Quad spread_tail(const void *x, std::size_t k, std::size_t count) {
            Quad quad = {};
            std::memcpy(quad.x, static_cast<const std::int8_t *>(x) + k, count);
            return quad;
        }
        static Sum dot(Sum sum, const Raw &raw, const Quad &x) {
            for (std::size_t i = 0; i < lanes; ++i)
                for (std::size_t k = 0; k < 4; ++k) sum.lane[i] += raw.byte[4 * i + k] * x.x[k];
            return sum;
        }
        static Raw load_tail(const unsigned char *p, std::size_t count, std::size_t columns) {
            Raw raw = {};
            for (std::size_t c = 0; c < columns; ++c) std::memcpy(raw.byte + 4 * c, p + c * count, count);
            return raw;
        }
    };
};

}  // namespace

ProductKernels scalar_products() { return products_over<Scalar>(); }

}  // namespace adapt

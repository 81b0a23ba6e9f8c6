// Number formats that tensors may have, and their conversions to and from float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// Small functions of inner loops, which the compiler would otherwise call where it finds them too many to copy.
#define ADAPT_INLINE inline __attribute__((always_inline))

namespace adapt {

enum class Type { f32, bf16, f16 };

struct BF16 {
    std::uint16_t bits;
};
struct F16 {
    std::uint16_t bits;
};

inline std::size_t bytes_of(Type type) { return type == Type::f32 ? 4 : 2; }

// Each file is compiled for one instruction set: internal linkage, so that none can run another's copy.
namespace {

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

// bfloat16: the upper half of a float32; round to nearest even, NaN stays NaN.
inline float from_bf16(BF16 value) { return bits_to_float(static_cast<std::uint32_t>(value.bits) << 16); }

inline BF16 to_bf16(float value) {
    const std::uint32_t bits = float_to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return BF16{static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
    return BF16{static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

inline float from_f16(F16 value) {
    const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
    const std::uint32_t exponent = (value.bits >> 10) & 0x1fu;
    const std::uint32_t fraction = value.bits & 0x3ffu;
    if (exponent == 0x1f) return bits_to_float(sign | 0x7f800000u | (fraction << 13));
    if (exponent) return bits_to_float(sign | ((exponent + 112u) << 23) | (fraction << 13));
    const float small = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -small : small;
}

inline F16 to_f16(float value) {
    const std::uint32_t bits = float_to_bits(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return F16{static_cast<std::uint16_t>(sign | 0x7e00u)};
    if (magnitude >= 0x477ff000u) return F16{static_cast<std::uint16_t>(sign | 0x7c00u)};
    if (magnitude < 0x38800000u) {
        // Below the smallest normal number the spacing is 2^-24: scaling there and back rounds to nearest even.
        const float scaled = bits_to_float(magnitude) + 0.5f;
        return F16{static_cast<std::uint16_t>(sign | (float_to_bits(scaled) - 0x3f000000u))};
    }
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return F16{static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

inline float to_float(float value) { return value; }
inline float to_float(BF16 value) { return from_bf16(value); }
inline float to_float(F16 value) { return from_f16(value); }

template <class T>
T from_float(float value);
template <>
inline float from_float<float>(float value) {
    return value;
}
template <>
inline BF16 from_float<BF16>(float value) {
    return to_bf16(value);
}
template <>
inline F16 from_float<F16>(float value) {
    return to_f16(value);
}

}  // namespace

// visit(type, f): f(T()) for the element type that ``type`` names.
template <class F>
auto visit(Type type, F &&f) {
    switch (type) {
        case Type::f32:
            return f(float());
        case Type::bf16:
            return f(BF16());
        default:
            return f(F16());
    }
}

}  // namespace adapt

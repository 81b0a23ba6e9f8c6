// One element at a time, portable C++: runs anywhere, and the twin that the vector files are tested against.
#include "rows_impl.h"

namespace adapt {
namespace {

float from_f16(F16 value) {
    const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
    const std::uint32_t exponent = (value.bits >> 10) & 0x1fu;
    const std::uint32_t fraction = value.bits & 0x3ffu;
    if (exponent == 0x1f) return bits_to_float(sign | 0x7f800000u | (fraction << 13));
    if (exponent) return bits_to_float(sign | ((exponent + 112u) << 23) | (fraction << 13));
    const float small = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -small : small;
}

F16 to_f16(float value) {
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

struct Scalar {
    static constexpr std::size_t width = 1;
    float value;

    static Scalar zero() { return {0.0f}; }
    static Scalar set(float v) { return {v}; }
    template <class T>
    static Scalar load(const T *p);
    template <class T>
    static Scalar load_tail(const T *p, std::size_t) {
        return load<T>(p);
    }
    template <class T>
    void store(T *p) const;
    template <class T>
    void store_tail(T *p, std::size_t) const {
        store<T>(p);
    }
    template <class T>
    Scalar round() const {
        T kept;
        store<T>(&kept);
        return load<T>(&kept);
    }
    float sum() const { return value; }
    Scalar negated() const { return {-value}; }
    Scalar exp() const { return {std::exp(value)}; }
    friend Scalar operator+(Scalar a, Scalar b) { return {a.value + b.value}; }
    friend Scalar operator*(Scalar a, Scalar b) { return {a.value * b.value}; }
    friend Scalar operator/(Scalar a, Scalar b) { return {a.value / b.value}; }
};

template <>
Scalar Scalar::load<float>(const float *p) {
    return {*p};
}
template <>
Scalar Scalar::load<BF16>(const BF16 *p) {
    return {from_bf16(*p)};
}
template <>
Scalar Scalar::load<F16>(const F16 *p) {
    return {from_f16(*p)};
}
template <>
void Scalar::store<float>(float *p) const {
    *p = value;
}
template <>
void Scalar::store<BF16>(BF16 *p) const {
    *p = to_bf16(value);
}
template <>
void Scalar::store<F16>(F16 *p) const {
    *p = to_f16(value);
}

}  // namespace

RowKernels scalar_kernels() { return kernels_over<Scalar>(); }

}  // namespace adapt

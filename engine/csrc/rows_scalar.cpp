// One element at a time, portable C++: runs anywhere, and the twin that the vector files are tested against.
#include "rows_impl.h"

namespace adapt {
namespace {

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
    static Scalar larger(Scalar a, Scalar b) { return {a.value > b.value ? a.value : b.value}; }
    Scalar exp() const { return {std::exp(value)}; }
    friend Scalar operator+(Scalar a, Scalar b) { return {a.value + b.value}; }
    friend Scalar operator*(Scalar a, Scalar b) { return {a.value * b.value}; }
    friend Scalar operator/(Scalar a, Scalar b) { return {a.value / b.value}; }
};

template <>
ADAPT_INLINE Scalar Scalar::load<float>(const float *p) {
    return {*p};
}
template <>
ADAPT_INLINE Scalar Scalar::load<BF16>(const BF16 *p) {
    return {from_bf16(*p)};
}
template <>
ADAPT_INLINE Scalar Scalar::load<F16>(const F16 *p) {
    return {from_f16(*p)};
}
template <>
ADAPT_INLINE void Scalar::store<float>(float *p) const {
    *p = value;
}
template <>
ADAPT_INLINE void Scalar::store<BF16>(BF16 *p) const {
    *p = to_bf16(value);
}
template <>
ADAPT_INLINE void Scalar::store<F16>(F16 *p) const {
    *p = to_f16(value);
}

}  // namespace

RowKernels scalar_kernels() { return kernels_over<Scalar>(); }

}  // namespace adapt

// Arrays as Python hands them over: checks of dtype, shape, stride and overlap. Nothing is converted or copied.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

#include "ops.h"

namespace adapt_python {

namespace nb = nanobind;
using adapt::bytes_of;

using Array = nb::ndarray<nb::device::cpu>;
using Constant = nb::ndarray<nb::ro, nb::device::cpu>;

[[noreturn]] inline void refuse(const char *name, const std::string &rule) {
    throw std::invalid_argument(std::string(name) + ": " + rule);
}

template <class A>
adapt::Type type_of(const char *name, const A &array) {
    const nb::dlpack::dtype type = array.dtype();
    const bool is_float = type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float) && type.lanes == 1;
    if (is_float && type.bits == 32) return adapt::Type::f32;
    if (is_float && type.bits == 16) return adapt::Type::f16;
    if (type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat) && type.bits == 16 && type.lanes == 1)
        return adapt::Type::bf16;
    refuse(name, "dtype must be float32, bfloat16 or float16");
}

// A matrix whose rows are dense; the distance between rows is free.
template <class A>
void check_rows(const char *name, const A &array) {
    if (array.ndim() != 2) refuse(name, "must have 2 dimensions, has " + std::to_string(array.ndim()));
    if (array.shape(1) > 1 && array.stride(1) != 1)
        refuse(name, "elements of a row must be adjacent, stride is " + std::to_string(array.stride(1)));
    if (array.stride(0) < 0) refuse(name, "rows must not run backwards");
}

template <class A, class B>
void check_same(const char *name, const A &array, const char *other_name, const B &other) {
    if (array.shape(0) != other.shape(0) || array.shape(1) != other.shape(1))
        refuse(name, std::string("shape differs from that of ") + other_name);
    if (type_of(name, array) != type_of(other_name, other))
        refuse(name, std::string("dtype differs from that of ") + other_name);
}

inline void check_out(const Array &out) {
    check_rows("out", out);
    if (out.shape(0) > 1 && static_cast<std::size_t>(out.stride(0)) < out.shape(1)) refuse("out", "rows overlap");
}

template <class A>
const char *row(const A &array, std::size_t index, std::size_t bytes) {
    return static_cast<const char *>(array.data()) + index * static_cast<std::size_t>(array.stride(0)) * bytes;
}

inline char *row_out(const Array &array, std::size_t index, std::size_t bytes) {
    return static_cast<char *>(array.data()) + index * static_cast<std::size_t>(array.stride(0)) * bytes;
}

template <class A>
adapt::Input input_of(const char *name, const A &array) {
    check_rows(name, array);
    return {type_of(name, array), array.data(), array.shape(0), static_cast<std::size_t>(array.stride(0))};
}

inline adapt::Output output_of(const Array &array) {
    check_out(array);
    return {type_of("out", array), array.data(), static_cast<std::size_t>(array.stride(0))};
}

template <class T, class A>
const T *dense_of(const char *name, const A &array, std::size_t rows, std::size_t columns) {
    if (array.ndim() != 2 || array.shape(0) != rows || array.shape(1) != columns)
        refuse(name, "shape must be [" + std::to_string(rows) + ", " + std::to_string(columns) + "]");
    if (array.dtype() != nb::dtype<T>()) refuse(name, "dtype is not the one that is asked for");
    if ((columns > 1 && array.stride(1) != 1) || (rows > 1 && static_cast<std::size_t>(array.stride(0)) != columns))
        refuse(name, "must be dense");
    return static_cast<const T *>(array.data());
}

// Kernels of an instruction set; raises where this CPU or build lacks it.
adapt::Kernels kernels_at(int level);

void bind_rows(nb::module_ &m);
void bind_products(nb::module_ &m);
void bind_decoder(nb::module_ &m);

}  // namespace adapt_python

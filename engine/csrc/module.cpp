// Python bindings: checks of dtype, shape, stride and overlap, then one row kernel call per row.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "rows.h"

namespace nb = nanobind;

namespace {

using Array = nb::ndarray<nb::device::cpu>;
using Constant = nb::ndarray<nb::ro, nb::device::cpu>;

constexpr int level_avx512 = 0, level_avx2 = 1, level_scalar = 2;

[[noreturn]] void refuse(const char *name, const std::string &rule) {
    throw std::invalid_argument(std::string(name) + ": " + rule);
}

bool has_level(int level) {
    if (level == level_scalar) return true;
#ifdef ADAPT_X86
    if (level == level_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (level == level_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("f16c");
#endif
    return false;
}

adapt::RowKernels kernels_at(int level) {
    if (!has_level(level))
        throw std::invalid_argument("this CPU or build lacks instruction set level " + std::to_string(level));
#ifdef ADAPT_X86
    if (level == level_avx512) return adapt::avx512_kernels();
    if (level == level_avx2) return adapt::avx2_kernels();
#endif
    return adapt::scalar_kernels();
}

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    if (has_level(level_avx512)) names.emplace_back("avx512");
    if (has_level(level_avx2)) names.emplace_back("avx2");
    names.emplace_back("scalar");
    return names;
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

std::size_t bytes_of(adapt::Type type) { return type == adapt::Type::f32 ? 4 : 2; }

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

void check_out(const Array &out) {
    check_rows("out", out);
    if (out.shape(0) > 1 && static_cast<std::size_t>(out.stride(0)) < out.shape(1)) refuse("out", "rows overlap");
}

template <class A>
const char *row(const A &array, std::size_t index, std::size_t bytes) {
    return static_cast<const char *>(array.data()) + index * static_cast<std::size_t>(array.stride(0)) * bytes;
}

char *row_out(const Array &array, std::size_t index, std::size_t bytes) {
    return static_cast<char *>(array.data()) + index * static_cast<std::size_t>(array.stride(0)) * bytes;
}

void rms_norm(const Constant &x, const Constant &weight, const Array &out, double eps, int level) {
    check_rows("x", x);
    check_out(out);
    const adapt::Type type = type_of("x", x);
    check_same("out", out, "x", x);
    if (weight.ndim() != 1 || weight.shape(0) != x.shape(1) || (weight.shape(0) > 1 && weight.stride(0) != 1))
        refuse("weight", "must be one dense row of " + std::to_string(x.shape(1)) + " elements");
    if (type_of("weight", weight) != type) refuse("weight", "dtype differs from that of x");
    if (!(eps >= 0.0)) refuse("eps", "must be at least 0");
    const adapt::RowKernels kernels = kernels_at(level);
    const std::size_t rows = x.shape(0), width = x.shape(1), bytes = bytes_of(type);
    nb::gil_scoped_release released;
    for (std::size_t i = 0; i < rows; ++i)
        kernels.rms_norm(type, row(x, i, bytes), weight.data(), row_out(out, i, bytes), width, static_cast<float>(eps));
}

void swiglu(const Constant &gate, const Constant &up, const Array &out, int level) {
    check_rows("gate", gate);
    check_rows("up", up);
    check_out(out);
    check_same("up", up, "gate", gate);
    check_same("out", out, "gate", gate);
    const adapt::Type type = type_of("gate", gate);
    const adapt::RowKernels kernels = kernels_at(level);
    const std::size_t rows = gate.shape(0), width = gate.shape(1), bytes = bytes_of(type);
    nb::gil_scoped_release released;
    for (std::size_t i = 0; i < rows; ++i)
        kernels.swiglu(type, row(gate, i, bytes), row(up, i, bytes), row_out(out, i, bytes), width);
}

// Rows of x come in groups of as many as there are rows for each row of angles: the heads of one position.
void rotate(const Constant &x, const Constant &cosines, const Constant &sines, const Array &out, int level) {
    check_rows("x", x);
    check_rows("cos", cosines);
    check_rows("sin", sines);
    check_out(out);
    check_same("out", out, "x", x);
    check_same("sin", sines, "cos", cosines);
    const adapt::Type type = type_of("x", x);
    if (type_of("cos", cosines) != adapt::Type::f32) refuse("cos", "dtype must be float32");
    const std::size_t rows = x.shape(0), half = cosines.shape(1), positions = cosines.shape(0);
    if (x.shape(1) != 2 * half) refuse("cos", "must have half as many columns as x, " + std::to_string(x.shape(1)));
    if (positions ? rows % positions != 0 : rows != 0)
        refuse("cos", std::to_string(rows) + " rows of x do not divide by its " + std::to_string(positions));
    const adapt::RowKernels kernels = kernels_at(level);
    const std::size_t heads = positions ? rows / positions : 0, bytes = bytes_of(type);
    nb::gil_scoped_release released;
    for (std::size_t i = 0; i < rows; ++i)
        kernels.rotate(type, row(x, i, bytes), reinterpret_cast<const float *>(row(cosines, i / heads, sizeof(float))),
                       reinterpret_cast<const float *>(row(sines, i / heads, sizeof(float))), row_out(out, i, bytes),
                       half);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Row kernels of adapt-engine. Arrays are never converted or copied; a mismatch raises.";
    m.def("supported_isas", &supported_isas, "Instruction sets that this CPU and build can run, best first.");
    m.def("rms_norm", &rms_norm, nb::arg("x").noconvert(), nb::arg("weight").noconvert(), nb::arg("out").noconvert(),
          nb::arg("eps"), nb::arg("level"),
          "out[T, n] = x / sqrt(mean(x^2) + eps) * weight[n]; level 0 avx512, 1 avx2, 2 scalar.");
    m.def("swiglu", &swiglu, nb::arg("gate").noconvert(), nb::arg("up").noconvert(), nb::arg("out").noconvert(),
          nb::arg("level"), "out[T, n] = silu(gate) * up.");
    m.def("rotate", &rotate, nb::arg("x").noconvert(), nb::arg("cos").noconvert(), nb::arg("sin").noconvert(),
          nb::arg("out").noconvert(), nb::arg("level"),
          "Pairs (i, i + n / 2) of x[T * H, n] turned by the angles of row t of cos and sin[T, n / 2], all H rows "
          "alike.");
}

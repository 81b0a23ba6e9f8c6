// Row kernels for Python: checks, then one kernel call per row.
#include "arrays.h"

namespace adapt_python {
namespace {

void rms_norm(const Constant &x, const Constant &weight, const Array &out, double eps, int level) {
    check_rows("x", x);
    check_out(out);
    const adapt::Type type = type_of("x", x);
    check_same("out", out, "x", x);
    if (weight.ndim() != 1 || weight.shape(0) != x.shape(1) || (weight.shape(0) > 1 && weight.stride(0) != 1))
        refuse("weight", "must be one dense row of " + std::to_string(x.shape(1)) + " elements");
    if (type_of("weight", weight) != type) refuse("weight", "dtype differs from that of x");
    if (!(eps >= 0.0)) refuse("eps", "must be at least 0");
    const adapt::RowKernels kernels = kernels_at(level).rows;
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
    const adapt::RowKernels kernels = kernels_at(level).rows;
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
    const adapt::RowKernels kernels = kernels_at(level).rows;
    const std::size_t heads = positions ? rows / positions : 0, bytes = bytes_of(type);
    nb::gil_scoped_release released;
    for (std::size_t i = 0; i < rows; ++i)
        kernels.rotate(type, row(x, i, bytes), reinterpret_cast<const float *>(row(cosines, i / heads, sizeof(float))),
                       reinterpret_cast<const float *>(row(sines, i / heads, sizeof(float))), row_out(out, i, bytes),
                       half);
}

// The largest logit's index, the lowest among equals; -1 where one is not finite.
std::int64_t greedy(const Constant &logits, int level) {
    if (logits.ndim() != 1 || logits.dtype() != nb::dtype<float>() || (logits.shape(0) > 1 && logits.stride(0) != 1) ||
        !logits.shape(0))
        refuse("logits", "must be one dense row of float32");
    return kernels_at(level).rows.greedy(static_cast<const float *>(logits.data()), logits.shape(0));
}

}  // namespace

void bind_rows(nb::module_ &m) {
    m.def("rms_norm", &rms_norm, nb::arg("x").noconvert(), nb::arg("weight").noconvert(), nb::arg("out").noconvert(),
          nb::arg("eps"), nb::arg("level"),
          "out[T, n] = x / sqrt(mean(x^2) + eps) * weight[n]; level 0 avx512, 1 avx2, 2 scalar.");
    m.def("swiglu", &swiglu, nb::arg("gate").noconvert(), nb::arg("up").noconvert(), nb::arg("out").noconvert(),
          nb::arg("level"), "out[T, n] = silu(gate) * up.");
    m.def("greedy", &greedy, nb::arg("logits").noconvert(), nb::arg("level"),
          "Index of the largest of float32 logits[V], the lowest among equals; -1 where one is not finite.");
    m.def("rotate", &rotate, nb::arg("x").noconvert(), nb::arg("cos").noconvert(), nb::arg("sin").noconvert(),
          nb::arg("out").noconvert(), nb::arg("level"),
          "Pairs (i, i + n / 2) of x[T * H, n] turned by the angles of row t of cos and sin[T, n / 2], all H rows "
          "alike.");
}

}  // namespace adapt_python

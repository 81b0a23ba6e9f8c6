// The extension module: instruction sets, threads, and what the bind_*.cpp files add.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "arrays.h"
#include "pool.h"

namespace adapt_python {
namespace {

constexpr int level_avx512 = 0, level_avx2 = 1, level_scalar = 2;

bool has_level(int level) {
    if (level == level_scalar) return true;
#ifdef ADAPT_X86
    if (level == level_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (level == level_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
               __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
#endif
    return false;
}

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    if (has_level(level_avx512)) names.emplace_back("avx512");
    if (has_level(level_avx2)) names.emplace_back("avx2");
    names.emplace_back("scalar");
    return names;
}

}  // namespace

adapt::Kernels kernels_at(int level) {
    if (!has_level(level))
        throw std::invalid_argument("this CPU or build lacks instruction set level " + std::to_string(level));
#ifdef ADAPT_X86
    if (level == level_avx512) return {adapt::avx512_kernels(), adapt::avx512_products()};
    if (level == level_avx2) return {adapt::avx2_kernels(), adapt::avx2_products()};
#endif
    return {adapt::scalar_kernels(), adapt::scalar_products()};
}

}  // namespace adapt_python

NB_MODULE(_native, m) {
    namespace nb = nanobind;
    m.doc() = "Kernels of adapt-engine. Arrays are never converted or copied; a mismatch raises.";
    m.def("supported_isas", &adapt_python::supported_isas,
          "Instruction sets that this CPU and build can run, best first.");
    m.def("set_threads", &adapt::set_threads, nb::arg("count"),
          "Threads that later calls of this process use, at least 1.");
    m.def("threads", &adapt::threads, "Threads that calls use.");
    adapt_python::bind_rows(m);
    adapt_python::bind_products(m);
    adapt_python::bind_decoder(m);
}

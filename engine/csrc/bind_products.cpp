// Packed matrices and the ops that multiply with them, for Python.
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "arrays.h"
#include "attention.h"
#include "pool.h"
#include "scratch.h"
#include "weights.h"

namespace adapt_python {
namespace {

adapt::Input rows_for(const char *name, const Constant &x, const adapt::Matrix &matrix) {
    const adapt::Input found = input_of(name, x);
    if (x.shape(1) != matrix.depth)
        refuse(name, "must have " + std::to_string(matrix.depth) + " columns, has " + std::to_string(x.shape(1)));
    if (!adapt::multiplies(found.type, matrix.format)) refuse(name, "dtype does not go with that of the matrix");
    return found;
}

adapt::Type bias_type_of(const Optional &bias, const adapt::Matrix &matrix) {
    if (!bias) return adapt::Type::f32;
    if (bias->ndim() != 1 || bias->shape(0) != matrix.columns || (bias->shape(0) > 1 && bias->stride(0) != 1))
        refuse("bias", "must be one dense row of " + std::to_string(matrix.columns) + " elements");
    return type_of("bias", *bias);
}

void linear(const Constant &x, const Weights &weights, std::size_t index, const Optional &bias, const Array &out,
            int level) {
    const adapt::Matrix matrix = weights.at(index);
    const adapt::Input in = rows_for("x", x, matrix);
    const adapt::Output to = output_of(out);
    if (out.shape(0) != in.rows || out.shape(1) != matrix.columns) refuse("out", "shape does not fit");
    const adapt::Type bias_type = bias_type_of(bias, matrix);
    const adapt::Kernels kernels = kernels_at(level);
    nb::gil_scoped_release released;
    adapt::Scratch::Scope scratch;
    float *wide = nullptr;
    if (bias) {
        wide = scratch.take<float>(matrix.columns);
        kernels.rows.widen(bias_type, bias->data(), wide, matrix.columns);
    }
    adapt::linear(kernels, in, matrix, wide, to);
}

// Of int8, the largest magnitude of each of ``rows`` rows; null for other formats.
const float *largest_of(const Optional &largest, std::size_t rows, const adapt::Matrix &matrix) {
    if (!matrix.scales) return nullptr;
    if (!largest || largest->ndim() != 1 || largest->dtype() != nb::dtype<float>() || largest->shape(0) != rows ||
        (rows > 1 && largest->stride(0) != 1))
        refuse("largest", "must be one dense row of float32 for an int8 matrix, one for each row");
    return static_cast<const float *>(largest->data());
}

void linear_sums(const Constant &x, const Weights &weights, std::size_t index, const Constant &ranges,
                 const Optional &largest, const Array &out, int level) {
    const adapt::Matrix matrix = weights.at(index);
    const adapt::Input in = rows_for("x", x, matrix);
    if (ranges.ndim() != 2) refuse("ranges", "must have two columns");
    const std::size_t count = ranges.shape(0);
    const std::int64_t *given = dense_of<std::int64_t>("ranges", ranges, count, 2);
    const auto depth = static_cast<std::int64_t>(matrix.depth), segment = static_cast<std::int64_t>(matrix.segment);
    std::vector<adapt::Range> chosen;
    for (std::size_t i = 0; i < count; ++i) {
        const std::int64_t first = given[2 * i], last = given[2 * i + 1];
        if (first < 0 || first >= last || last > depth || first % segment || (last < depth && last % segment))
            refuse("ranges", "must lie within the depth, from one border of a segment to another");
        chosen.push_back({static_cast<std::size_t>(first), static_cast<std::size_t>(last)});
    }
    const adapt::Output to = output_of(out);
    if (to.type != adapt::Type::f32 || out.shape(0) != count * in.rows || out.shape(1) != matrix.columns ||
        (out.shape(0) > 1 && to.stride != matrix.columns))
        refuse("out", "must be dense float32, a row for each range and row of x");
    const float *whole = largest_of(largest, in.rows, matrix);
    const adapt::Kernels kernels = kernels_at(level);
    nb::gil_scoped_release released;
    adapt::linear_sums(kernels, in, matrix, chosen.data(), count, whole, static_cast<float *>(to.data));
}

void linear_finish(const Constant &sums, const Weights &weights, std::size_t index, const Optional &largest,
                   const Optional &bias, const Array &out, int level) {
    const adapt::Matrix matrix = weights.at(index);
    const std::size_t rows = sums.ndim() ? sums.shape(0) : 0;
    const float *given = dense_of<float>("sums", sums, rows, matrix.columns);
    const adapt::Output to = output_of(out);
    if (out.shape(0) != rows || out.shape(1) != matrix.columns) refuse("out", "shape does not fit");
    const adapt::Type bias_type = bias_type_of(bias, matrix);
    const float *whole = largest_of(largest, rows, matrix);
    const adapt::Kernels kernels = kernels_at(level);
    nb::gil_scoped_release released;
    adapt::Scratch::Scope scratch;
    float *wide = nullptr;
    if (bias) {
        wide = scratch.take<float>(matrix.columns);
        kernels.rows.widen(bias_type, bias->data(), wide, matrix.columns);
    }
    adapt::linear_finish(kernels, given, rows, matrix, whole, wide, to);
}

void check_ids(const std::int64_t *ids, std::size_t count, std::size_t experts) {
    for (std::size_t i = 0; i < count; ++i)
        if (ids[i] < 0 || static_cast<std::size_t>(ids[i]) >= experts)
            throw nb::index_error("ids: an expert that is not there");
}

void expert_rows(const Constant &x, const Constant &ids, const Weights &gate, const Weights &up, const Weights &down,
                 const Array &out, int level) {
    const Experts held = experts_of(gate, up, down);
    const adapt::Input in = rows_for("x", x, held.gate.first);
    const adapt::Output to = output_of(out);
    if (ids.ndim() != 2 || ids.shape(0) * ids.shape(1) != out.shape(0) || (in.rows && ids.shape(0) != in.rows))
        refuse("ids", "must have a row for each row of x, and out a row for each of its elements");
    const std::size_t slots = ids.shape(1), count = out.shape(0);
    const std::int64_t *chosen = dense_of<std::int64_t>("ids", ids, ids.shape(0), slots);
    if (out.shape(1) != held.down.first.columns) refuse("out", "shape does not fit");
    check_ids(chosen, count, held.gate.count);
    const adapt::Kernels kernels = kernels_at(level);
    nb::gil_scoped_release released;
    adapt::expert_rows(kernels, in, chosen, count, slots, held.gate, held.up, held.down, to);
}

void experts(const Constant &x, const Constant &ids, const Constant &weights, const Weights &gate, const Weights &up,
             const Weights &down, const Array &out, int level) {
    const Experts held = experts_of(gate, up, down);
    const adapt::Input in = rows_for("x", x, held.gate.first);
    const adapt::Output to = output_of(out);
    if (ids.ndim() != 2 || !ids.shape(1) || ids.shape(1) > most_slots)
        refuse("ids", "must have 1 to " + std::to_string(most_slots) + " columns");
    const std::size_t slots = ids.shape(1);
    const std::int64_t *chosen = dense_of<std::int64_t>("ids", ids, in.rows, slots);
    const float *factors = dense_of<float>("weights", weights, in.rows, slots);
    check_same("out", out, "x", x);
    check_ids(chosen, in.rows * slots, held.gate.count);
    const adapt::Kernels kernels = kernels_at(level);
    nb::gil_scoped_release released;
    adapt::experts(kernels, in, chosen, factors, slots, held.gate, held.up, held.down, to);
}

void combine(const Constant &down, const Constant &weights, const Array &out, int level) {
    const adapt::Input in = input_of("down", down);
    const adapt::Output to = output_of(out);
    if (weights.ndim() != 2 || !weights.shape(1) || weights.shape(1) > most_slots)
        refuse("weights", "must have 1 to " + std::to_string(most_slots) + " columns");
    const std::size_t rows = weights.shape(0), slots = weights.shape(1);
    const float *factors = dense_of<float>("weights", weights, rows, slots);
    if (in.rows != rows * slots) refuse("down", "must have a row for each weight");
    if (out.shape(0) != rows || out.shape(1) != down.shape(1) || to.type != in.type)
        refuse("out", "shape or dtype does not fit");
    const adapt::Kernels kernels = kernels_at(level);
    nb::gil_scoped_release released;
    if (rows) adapt::combine(kernels, in, factors, slots, down.shape(1), to);
}

void route(const Constant &logits, const Optional &bias, std::size_t groups, std::size_t kept, bool softmax,
           bool renormalise, float scale, const Array &scores, const Array &selection, const Array &ids,
           const Array &weights, int level) {
    const adapt::Input in = input_of("logits", logits);
    const std::size_t experts = logits.shape(1), rows = in.rows;
    if (in.type != adapt::Type::f32 || !experts) refuse("logits", "must be float32 and not empty");
    if (ids.ndim() != 2 || !ids.shape(1) || ids.shape(1) > experts)
        refuse("ids", "must have 1 to " + std::to_string(experts) + " columns");
    const std::size_t chosen = ids.shape(1);
    check_choice(experts, chosen, groups, kept);
    if (bias && (bias->ndim() != 1 || bias->shape(0) != experts || bias->dtype() != nb::dtype<float>() ||
                 (experts > 1 && bias->stride(0) != 1)))
        refuse("bias", "must be one dense row of float32, one for each expert");
    auto *to_scores = const_cast<float *>(dense_of<float>("scores", scores, rows, experts));
    auto *to_selection = const_cast<float *>(dense_of<float>("selection", selection, rows, experts));
    auto *to_ids = const_cast<std::int64_t *>(dense_of<std::int64_t>("ids", ids, rows, chosen));
    auto *to_weights = const_cast<float *>(dense_of<float>("weights", weights, rows, chosen));
    const adapt::Kernels kernels = kernels_at(level);
    const adapt::Choice choice{experts, chosen, groups, kept, softmax, renormalise, scale};
    nb::gil_scoped_release released;
    adapt::route(kernels, static_cast<const float *>(in.data), rows, in.stride,
                 bias ? static_cast<const float *>(bias->data()) : nullptr, choice, to_scores, to_selection, to_ids,
                 to_weights);
}

adapt::HeadRows heads_of(const char *name, const Constant &array) {
    if (array.ndim() != 3) refuse(name, "must have 3 dimensions, has " + std::to_string(array.ndim()));
    if (array.shape(2) > 1 && array.stride(2) != 1) refuse(name, "elements of a head must be adjacent");
    if (array.stride(0) < 0 || array.stride(1) < 0) refuse(name, "rows must not run backwards");
    return {type_of(name, array), array.data(), static_cast<std::size_t>(array.stride(0)),
            static_cast<std::size_t>(array.stride(1))};
}

const std::int64_t *row_of_ids(const char *name, const Constant &ids, std::size_t length) {
    if (ids.ndim() != 1 || ids.shape(0) != length || ids.dtype() != nb::dtype<std::int64_t>() ||
        (length > 1 && ids.stride(0) != 1))
        refuse(name, "must be one dense row of " + std::to_string(length) + " int64");
    return static_cast<const std::int64_t *>(ids.data());
}

void attention(const Constant &q, const Constant &k, const Constant &v, const Constant &q_positions,
               const Constant &k_positions, float scale, std::size_t window, const Array &out,
               const std::optional<Array> &weights, int level) {
    const adapt::HeadRows queries = heads_of("q", q), keys = heads_of("k", k), values = heads_of("v", v);
    const std::size_t rows = q.shape(0), heads = q.shape(1), groups = k.shape(1), width = q.shape(2);
    if (queries.type != keys.type || values.type != keys.type) refuse("k", "q, k and v must have one dtype");
    if (!groups || heads % groups || v.shape(1) != groups)
        refuse("k", "its heads must divide those of q and be those of v");
    if (!width || k.shape(2) != width || !v.shape(2)) refuse("k", "heads must be as wide as those of q, and not empty");
    if (v.shape(0) != k.shape(0)) refuse("v", "must have a row for each row of k");
    const std::int64_t *asking = row_of_ids("q_positions", q_positions, rows);
    const std::int64_t *seen = row_of_ids("k_positions", k_positions, k.shape(0));
    if (!std::is_sorted(asking, asking + rows) || (rows && asking[0] < 0))
        refuse("q_positions", "must ascend from 0 or more");
    if (!std::is_sorted(seen, seen + k.shape(0)) || (k.shape(0) && seen[0] < 0))
        refuse("k_positions", "must ascend from 0 or more");
    // A chunk has room for one key at each of its positions.
    if (std::adjacent_find(seen, seen + k.shape(0)) != seen + k.shape(0)) refuse("k_positions", "must not repeat");
    const adapt::Type type = type_of("out", out);
    if (out.ndim() != 3 || out.shape(0) != rows || out.shape(1) != heads || out.shape(2) != v.shape(2) ||
        (out.size() && (out.stride(2) != 1 || static_cast<std::size_t>(out.stride(1)) != v.shape(2) ||
                        static_cast<std::size_t>(out.stride(0)) != heads * v.shape(2))))
        refuse("out", "must be dense, [rows of q, heads of q, width of v]");
    float *logs = nullptr;
    if (weights) logs = const_cast<float *>(dense_of<float>("weights", *weights, rows, heads));
    const adapt::Kernels kernels = kernels_at(level);
    const adapt::Heads shape{heads, groups, width, v.shape(2), scale, window};
    const adapt::Reading reading{0, rows, k.shape(0), asking, nullptr, seen};
    nb::gil_scoped_release released;
    if (rows) adapt::attention(kernels, shape, queries, keys, values, &reading, 1, type, out.data(), logs);
}

double roof_multiply(int format, std::size_t rounds, int level) {
    const adapt::Kernels kernels = kernels_at(level);
    const adapt::Format kind = format_at(format);
    std::vector<double> done(static_cast<std::size_t>(adapt::threads()));
    std::vector<float> results(done.size() * 16);
    nb::gil_scoped_release released;
    adapt::parallel(adapt::threads(), [&](int part, int) {
        const auto own = static_cast<std::size_t>(part);
        done[own] = kernels.products.multiply(kind, rounds, &results[own * 16]);
    });
    return std::accumulate(done.begin(), done.end(), 0.0);
}

void huge(const Array &data) {
    if (data.ndim() != 1 || data.stride(0) != 1) refuse("data", "must be one dense row");
    large_pages(data.data(), data.nbytes());
}

double roof_read(const Constant &data, int level) {
    if (data.ndim() != 1 || data.itemsize() != 1 || data.stride(0) != 1 ||
        reinterpret_cast<std::uintptr_t>(data.data()) % 64)
        refuse("data", "must be one dense row of bytes that starts on a cache line");
    const adapt::Kernels kernels = kernels_at(level);
    const auto *bytes = static_cast<const char *>(data.data());
    const std::size_t lines = data.shape(0) / 64;
    std::vector<float> results(static_cast<std::size_t>(adapt::threads()) * 16);
    nb::gil_scoped_release released;
    adapt::parallel(adapt::threads(), [&](int part, int parts) {
        const adapt::Range range = adapt::share(lines, part, parts);
        results[static_cast<std::size_t>(part) * 16] =
            kernels.products.read(bytes + range.first * 64, (range.last - range.first) * 64);
    });
    return static_cast<double>(std::accumulate(results.begin(), results.end(), 0.0f));
}

}  // namespace

void bind_products(nb::module_ &m) {
    nb::class_<Weights>(m, "Weights", "Matrices in the kernels' order, in memory that the caller allocated.")
        .def(nb::init<const Array &, const std::optional<Array> &, int, std::size_t, std::size_t, std::size_t,
                      std::size_t>(),
             nb::arg("storage").noconvert(), nb::arg("scales").noconvert().none(), nb::arg("format"), nb::arg("count"),
             nb::arg("columns"), nb::arg("depth"), nb::arg("segment"))
        .def("pack", &Weights::pack, nb::arg("source").noconvert(), nb::arg("index"),
             nb::arg("largest").noconvert().none() = nb::none())
        .def("unpack", &Weights::unpack, nb::arg("index"), nb::arg("ids").noconvert().none(),
             nb::arg("out").noconvert());
    m.def("linear", &linear, nb::arg("x").noconvert(), nb::arg("weights"), nb::arg("index"),
          nb::arg("bias").noconvert().none(), nb::arg("out").noconvert(), nb::arg("level"),
          "out[T, columns] = x[T, depth] times matrix ``index``, plus bias[columns]; rounded once.");
    m.def("linear_sums", &linear_sums, nb::arg("x").noconvert(), nb::arg("weights"), nb::arg("index"),
          nb::arg("ranges").noconvert(), nb::arg("largest").noconvert().none(), nb::arg("out").noconvert(),
          nb::arg("level"), "out[R * T, columns]: the product over each range of depth, neither scaled nor rounded.");
    m.def("linear_finish", &linear_finish, nb::arg("sums").noconvert(), nb::arg("weights"), nb::arg("index"),
          nb::arg("largest").noconvert().none(), nb::arg("bias").noconvert().none(), nb::arg("out").noconvert(),
          nb::arg("level"), "out[T, columns] of whole sums[T, columns]: scales, bias, and one rounding.");
    m.def("expert_rows", &expert_rows, nb::arg("x").noconvert(), nb::arg("ids").noconvert(), nb::arg("gate"),
          nb::arg("up"), nb::arg("down"), nb::arg("out").noconvert(), nb::arg("level"),
          "out[T * k, h]: row t of x through expert ids[t, k].");
    m.def("experts", &experts, nb::arg("x").noconvert(), nb::arg("ids").noconvert(), nb::arg("weights").noconvert(),
          nb::arg("gate"), nb::arg("up"), nb::arg("down"), nb::arg("out").noconvert(), nb::arg("level"),
          "out[T, h]: the weighted sum of each row's experts.");
    m.def("combine", &combine, nb::arg("down").noconvert(), nb::arg("weights").noconvert(), nb::arg("out").noconvert(),
          nb::arg("level"), "out[T, h] = sum over k of down[T * k, h] times weights[T, k], in order of k.");
    m.def("route", &route, nb::arg("logits").noconvert(), nb::arg("bias").noconvert().none(), nb::arg("groups"),
          nb::arg("kept"), nb::arg("softmax"), nb::arg("renormalise"), nb::arg("scale"), nb::arg("scores").noconvert(),
          nb::arg("selection").noconvert(), nb::arg("ids").noconvert(), nb::arg("weights").noconvert(),
          nb::arg("level"), "Scores, selection, ids (ascending) and weights of every row of logits[T, E].");
    m.def("attention", &attention, nb::arg("q").noconvert(), nb::arg("k").noconvert(), nb::arg("v").noconvert(),
          nb::arg("q_positions").noconvert(), nb::arg("k_positions").noconvert(), nb::arg("scale"), nb::arg("window"),
          nb::arg("out").noconvert(), nb::arg("weights").noconvert().none(), nb::arg("level"),
          "Causal attention of one sequence; window 0 sees everything. weights[T, H]: natural log-sum-exp.");
    m.def("roof_multiply", &roof_multiply, nb::arg("format"), nb::arg("rounds"), nb::arg("level"),
          "Multiply-adds of a format without memory, on every thread; the operations done, two for each.");
    m.def("large_pages", &huge, nb::arg("data").noconvert(), "Ask for large pages behind memory not yet touched.");
    m.def("roof_read", &roof_read, nb::arg("data").noconvert(), nb::arg("level"),
          "Reads every byte of data once, each thread its share; returns their sum as float32 numbers.");
}

}  // namespace adapt_python

// The decoder for Python: built once from weights and cache, then one call a step.
#include "decoder.h"

#include <algorithm>
#include <array>
#include <utility>

#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include "scratch.h"
#include "weights.h"

namespace adapt_python {
namespace {

// A decoder and the arrays that it points into.
class Bound {
  public:
    Bound(int type, std::size_t hidden, double eps, int level)
        : decoder_(kernels_at(level), type_at(type), hidden, static_cast<float>(eps)) {}

    void add_layer(const Constant &attention_norm, const Constant &ffn_norm, const Optional &q_norm,
                   const Optional &k_norm, const Weights &q, const Optional &q_bias, const Weights &k,
                   const Optional &k_bias, const Weights &v, const Optional &v_bias, const Weights &out,
                   const Optional &out_bias, const Array &keys, const Array &values, std::size_t heads, double scale,
                   std::size_t window, double eps, double head_eps) {
        adapt::Layer layer{};
        layer.keys = pages("keys", keys);
        layer.values = pages("values", values);
        const std::size_t kv_heads = keys.shape(1), width = keys.shape(2), value_width = values.shape(2);
        if (!heads || heads % kv_heads || values.shape(1) != kv_heads || width % 2)
            refuse("heads", "key heads must divide the query heads, and heads must have even widths");
        layer.heads = {heads, kv_heads, width, value_width, static_cast<float>(scale), window};
        layer.eps = static_cast<float>(eps);
        layer.head_eps = static_cast<float>(head_eps);
        layer.attention_norm = vector("attention_norm", attention_norm, decoder_.hidden());
        layer.ffn_norm = vector("ffn_norm", ffn_norm, decoder_.hidden());
        layer.q_norm = q_norm ? vector("q_norm", *q_norm, width) : nullptr;
        layer.k_norm = k_norm ? vector("k_norm", *k_norm, width) : nullptr;
        layer.q = product("q", q, q_bias, heads * width, decoder_.hidden());
        layer.k = product("k", k, k_bias, kv_heads * width, decoder_.hidden());
        layer.v = product("v", v, v_bias, kv_heads * value_width, decoder_.hidden());
        layer.out = product("out", out, out_bias, decoder_.hidden(), heads * value_width);
        same_rows("k", layer.q.matrix, layer.k.matrix);
        same_rows("v", layer.q.matrix, layer.v.matrix);
        decoder_.layers.push_back(std::move(layer));
    }

    void set_dense(const Weights &gate, const Optional &gate_bias, const Weights &up, const Optional &up_bias,
                   const Weights &down, const Optional &down_bias) {
        const std::size_t inter = gate.at(0).columns;
        auto parts = std::make_unique<std::vector<adapt::Linear>>();
        parts->push_back(product("gate", gate, gate_bias, inter, decoder_.hidden()));
        parts->push_back(product("up", up, up_bias, inter, decoder_.hidden()));
        parts->push_back(product("down", down, down_bias, decoder_.hidden(), inter));
        same_rows("up", (*parts)[0].matrix, (*parts)[1].matrix);
        last().dense = std::move(parts);
    }

    void set_routed(const Weights &router, const Optional &bias, const Weights &gate, const Weights &up,
                    const Weights &down, std::size_t chosen, std::size_t groups, std::size_t kept, bool softmax,
                    bool renormalise, double scale) {
        const Experts held = experts_of(gate, up, down);
        const std::size_t experts = held.gate.count;
        check_choice(experts, chosen, groups, kept);
        if (chosen > most_slots) refuse("chosen", "must be at most " + std::to_string(most_slots));
        auto routed = std::make_unique<adapt::Routed>(
            adapt::Routed{router.at(0), nullptr,
                          adapt::Choice{experts, chosen, groups, kept, softmax, renormalise, static_cast<float>(scale)},
                          held.gate, held.up, held.down});
        if (routed->router.columns != experts || routed->router.depth != decoder_.hidden() ||
            held.gate.first.depth != decoder_.hidden())
            refuse("router", "must be [experts, hidden], and the experts as wide");
        if (!adapt::multiplies(decoder_.type(), routed->router.format) ||
            !adapt::multiplies(decoder_.type(), held.gate.first.format))
            refuse("gate", "dtype does not go with that of the rows");
        if (bias) {
            if (bias->ndim() != 1 || bias->shape(0) != experts || bias->dtype() != nb::dtype<float>() ||
                (experts > 1 && bias->stride(0) != 1))
                refuse("bias", "must be one dense row of float32, one for each expert");
            kept_.push_back(*bias);
            routed->selection_bias = static_cast<const float *>(bias->data());
        }
        last().routed = std::move(routed);
    }

    void set_head(const Constant &final_norm, const Weights &head) {
        decoder_.final_norm = vector("final_norm", final_norm, decoder_.hidden());
        const adapt::Matrix matrix = head.at(0);
        if (matrix.depth != decoder_.hidden() || !adapt::multiplies(decoder_.type(), matrix.format))
            refuse("head", "must be [vocabulary, hidden] of the rows' dtype");
        decoder_.head = std::make_unique<adapt::Matrix>(matrix);
    }

    void set_table(const Constant &table) {
        check_rows("table", table);
        if (table.shape(1) != decoder_.hidden() || type_of("table", table) != decoder_.type() ||
            (table.shape(0) > 1 && static_cast<std::size_t>(table.stride(0)) != decoder_.hidden()))
            refuse("table", "must be dense rows of the model's dtype and width");
        kept_.push_back(table);
        decoder_.table = table.data();
        vocab_ = table.shape(0);
    }

    void set_packed_table(const Weights &table) {
        const adapt::Matrix matrix = table.at(0);
        if (matrix.depth != decoder_.hidden() || matrix.scales || !adapt::multiplies(decoder_.type(), matrix.format))
            refuse("table", "must be [vocabulary, hidden] of the rows' dtype");
        decoder_.packed_table = std::make_unique<adapt::Matrix>(matrix);
        vocab_ = matrix.columns;
    }

    // Angles of positions 0 .. n - 1, which `step` reads.
    void set_angles(const Constant &cosines, const Constant &sines) {
        const std::size_t half = decoder_.layers.empty() ? 0 : decoder_.layers[0].heads.width / 2;
        cosines_ = dense_of<float>("cos", cosines, cosines.shape(0), half);
        sines_ = dense_of<float>("sin", sines, cosines.shape(0), half);
        angles_ = {cosines, sines};
    }

    // ids: tokens of all sequences; a span: positions [first, last) of one, the address of its ``last`` int64 slots,
    // and the first position whose logits are wanted.
    void step(const std::vector<std::int64_t> &ids, const std::vector<std::array<std::size_t, 4>> &spans,
              const Array &logits) const {
        if (!decoder_.head || (!decoder_.table && !decoder_.packed_table)) refuse("step", "needs a table and a head");
        check_layers();
        const std::size_t rows = ids.size(), room = room_of(), half = decoder_.layers[0].heads.width / 2;
        for (const std::int64_t id : ids)
            if (id < 0 || static_cast<std::size_t>(id) >= vocab_)
                throw nb::index_error("ids: a token that is not there");
        adapt::Scratch::Scope scratch;
        std::int64_t *slots = scratch.take<std::int64_t>(rows), *positions = scratch.take<std::int64_t>(rows);
        std::int64_t *heads = scratch.take<std::int64_t>(rows);
        float *cosines = scratch.take<float>(rows * half), *sines = scratch.take<float>(rows * half);
        auto *readings = scratch.take<adapt::Reading>(spans.size());
        std::size_t row = 0, wanted = 0, count = 0;
        for (const auto &[first, last, address, head] : spans) {
            if (first >= last || last - first > rows - row || head < first || head > last)
                refuse("spans", "must be ranges of positions that cover all ids");
            if (!angles_.size() || last > angles_[0].shape(0)) refuse("angles", "must reach every position");
            const auto *own = reinterpret_cast<const std::int64_t *>(static_cast<std::uintptr_t>(address));
            check_slots(own, last, room);
            readings[count++] = {row, last - first, last, positions + row, own, nullptr};
            for (std::size_t position = first; position < last; ++position, ++row) {
                positions[row] = static_cast<std::int64_t>(position);
                slots[row] = own[position];
                std::copy_n(cosines_ + position * half, half, cosines + row * half);
                std::copy_n(sines_ + position * half, half, sines + row * half);
                if (position >= head) heads[wanted++] = static_cast<std::int64_t>(row);
            }
        }
        if (row != rows) refuse("spans", "must be ranges of positions that cover all ids");
        adapt::Pass pass{rows, nullptr, slots, cosines, sines, readings, count, heads, wanted, nullptr};
        pass.logits = const_cast<float *>(dense_of<float>("logits", logits, wanted, decoder_.head->columns));
        pass.x = scratch.take<char>(rows * decoder_.hidden() * bytes_of(decoder_.type()));
        nb::gil_scoped_release released;
        if (!rows) return;
        decoder_.embed(ids.data(), rows, pass.x);
        decoder_.run(pass);
    }

    // spans[i]: first row, rows, known tokens, address of the int64 slots of those tokens.
    void run(const Array &x, const Constant &positions, const Constant &slots, const Constant &cosines,
             const Constant &sines, const Constant &spans, const Constant &head_rows,
             const std::optional<Array> &logits) const {
        const adapt::Output stream = output_of(x);
        const std::size_t rows = x.shape(0);
        if (stream.type != decoder_.type() || x.shape(1) != decoder_.hidden() ||
            (rows > 1 && stream.stride != decoder_.hidden()))
            refuse("x", "must be dense rows of the model's dtype and width");
        check_layers();
        const std::size_t half = decoder_.layers[0].heads.width / 2, room = room_of();
        adapt::Pass pass{};
        pass.rows = rows;
        pass.x = stream.data;
        const std::int64_t *asking = indices("positions", positions, rows);
        pass.slots = indices("slots", slots, rows);
        pass.cosines = dense_of<float>("cos", cosines, rows, half);
        pass.sines = dense_of<float>("sin", sines, rows, half);
        check_slots(pass.slots, rows, room);
        if (spans.ndim() != 2 || spans.shape(1) != 4) refuse("spans", "must have 4 columns");
        const std::size_t sequences = spans.shape(0);
        const std::int64_t *table = dense_of<std::int64_t>("spans", spans, sequences, 4);
        std::vector<adapt::Reading> readings;
        std::size_t reached = 0;
        for (std::size_t i = 0; i < sequences; ++i, table += 4) {
            const auto first = static_cast<std::size_t>(table[0]), count = static_cast<std::size_t>(table[1]);
            const auto keys = static_cast<std::size_t>(table[2]);
            const auto *own = reinterpret_cast<const std::int64_t *>(static_cast<std::uintptr_t>(table[3]));
            if (first != reached || first + count > rows || !count) refuse("spans", "must follow each other");
            for (std::size_t r = 0; r < count; ++r)
                if (asking[first + r] != static_cast<std::int64_t>(keys - count + r))
                    refuse("positions", "rows of a sequence must be its last known tokens, in order");
            check_slots(own, keys, room);
            readings.push_back({first, count, keys, asking + first, own, nullptr});
            reached = first + count;
        }
        if (reached != rows) refuse("spans", "must cover all rows");
        pass.readings = readings.data();
        pass.sequences = sequences;
        pass.wanted = head_rows.ndim() == 1 ? head_rows.shape(0) : 0;
        pass.head_rows = indices("head_rows", head_rows, pass.wanted);
        check_slots(pass.head_rows, pass.wanted, rows);
        if (logits) {
            if (!decoder_.head) refuse("logits", "this decoder has no head");
            pass.logits = const_cast<float *>(dense_of<float>("logits", *logits, pass.wanted, decoder_.head->columns));
        }
        nb::gil_scoped_release released;
        if (rows) decoder_.run(pass);
    }

  private:
    void check_layers() const {
        if (decoder_.layers.empty()) refuse("layers", "there are none");
        for (const adapt::Layer &layer : decoder_.layers) {
            if (layer.heads.width != decoder_.layers[0].heads.width) refuse("layers", "heads must be equally wide");
            if (!layer.routed && !layer.dense) refuse("layers", "one has no feed-forward part");
        }
    }
    std::size_t room_of() const {
        std::size_t room = decoder_.layers[0].keys.slots;
        for (const adapt::Layer &layer : decoder_.layers) room = std::min({room, layer.keys.slots, layer.values.slots});
        return room;
    }

    static adapt::Type type_at(int code) {
        if (code < 0 || code > 2) refuse("type", "must be 0 float32, 1 bfloat16 or 2 float16");
        return static_cast<adapt::Type>(code);
    }
    static const std::int64_t *indices(const char *name, const Constant &array, std::size_t length) {
        if (array.ndim() != 1 || array.shape(0) != length || array.dtype() != nb::dtype<std::int64_t>() ||
            (length > 1 && array.stride(0) != 1))
            refuse(name, "must be one dense row of int64");
        return static_cast<const std::int64_t *>(array.data());
    }
    static void check_slots(const std::int64_t *slots, std::size_t count, std::size_t room) {
        for (std::size_t i = 0; i < count; ++i)
            if (slots[i] < 0 || static_cast<std::size_t>(slots[i]) >= room)
                throw nb::index_error("slots: one that is not there");
    }

    adapt::Layer &last() {
        if (decoder_.layers.empty()) refuse("layers", "there is none yet");
        return decoder_.layers.back();
    }

    const void *vector(const char *name, const Constant &array, std::size_t length) {
        if (array.ndim() != 1 || array.shape(0) != length || (length > 1 && array.stride(0) != 1))
            refuse(name, "must be one dense row of " + std::to_string(length) + " elements");
        if (type_of(name, array) != decoder_.type()) refuse(name, "dtype must be that of the rows");
        kept_.push_back(array);
        return array.data();
    }

    adapt::Linear product(const char *name, const Weights &weights, const Optional &bias, std::size_t columns,
                          std::size_t depth) {
        adapt::Linear found{weights.at(0), {}};
        if (found.matrix.columns != columns || found.matrix.depth != depth)
            refuse(name, "must be [" + std::to_string(columns) + ", " + std::to_string(depth) + "]");
        if (!adapt::multiplies(decoder_.type(), found.matrix.format))
            refuse(name, "dtype does not go with that of the rows");
        if (bias) {
            const void *data = vector(name, *bias, columns);
            found.bias.resize(columns);
            decoder_.kernels().rows.widen(decoder_.type(), data, found.bias.data(), columns);
        }
        return found;
    }

    static void same_rows(const char *name, const adapt::Matrix &a, const adapt::Matrix &b) {
        if (a.format != b.format || a.segment != b.segment)
            refuse(name, "format and segments must be those of the first");
    }

    adapt::Pages pages(const char *name, const Array &array) {
        if (array.ndim() != 3 || !array.shape(1) || !array.shape(2)) refuse(name, "must be [slots, heads, width]");
        if (type_of(name, array) != decoder_.type()) refuse(name, "dtype must be that of the rows");
        if (array.stride(2) != 1 || static_cast<std::size_t>(array.stride(1)) != array.shape(2) ||
            static_cast<std::size_t>(array.stride(0)) != array.shape(1) * array.shape(2))
            refuse(name, "must be dense");
        kept_.push_back(Constant(array));
        return {array.data(), array.shape(0)};
    }

    adapt::Decoder decoder_;
    std::vector<Constant> kept_, angles_;
    const float *cosines_ = nullptr, *sines_ = nullptr;
    std::size_t vocab_ = 0;
};

}  // namespace

void bind_decoder(nb::module_ &m) {
    nb::class_<Bound>(m, "Decoder", "Layers of a decoder over its weights and its cache.")
        .def(nb::init<int, std::size_t, double, int>(), nb::arg("type"), nb::arg("hidden"), nb::arg("eps"),
             nb::arg("level"))
        .def("add_layer", &Bound::add_layer, nb::arg("attention_norm").noconvert(), nb::arg("ffn_norm").noconvert(),
             nb::arg("q_norm").noconvert().none(), nb::arg("k_norm").noconvert().none(), nb::arg("q"),
             nb::arg("q_bias").noconvert().none(), nb::arg("k"), nb::arg("k_bias").noconvert().none(), nb::arg("v"),
             nb::arg("v_bias").noconvert().none(), nb::arg("out"), nb::arg("out_bias").noconvert().none(),
             nb::arg("keys").noconvert(), nb::arg("values").noconvert(), nb::arg("heads"), nb::arg("scale"),
             nb::arg("window"), nb::arg("eps"), nb::arg("head_eps"), nb::keep_alive<1, 6>(), nb::keep_alive<1, 8>(),
             nb::keep_alive<1, 10>(), nb::keep_alive<1, 12>())
        .def("set_dense", &Bound::set_dense, nb::arg("gate"), nb::arg("gate_bias").noconvert().none(), nb::arg("up"),
             nb::arg("up_bias").noconvert().none(), nb::arg("down"), nb::arg("down_bias").noconvert().none(),
             nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 6>())
        .def("set_routed", &Bound::set_routed, nb::arg("router"), nb::arg("bias").noconvert().none(), nb::arg("gate"),
             nb::arg("up"), nb::arg("down"), nb::arg("chosen"), nb::arg("groups"), nb::arg("kept"), nb::arg("softmax"),
             nb::arg("renormalise"), nb::arg("scale"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>(),
             nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>())
        .def("set_head", &Bound::set_head, nb::arg("final_norm").noconvert(), nb::arg("head"), nb::keep_alive<1, 3>())
        .def("set_table", &Bound::set_table, nb::arg("table").noconvert())
        .def("set_packed_table", &Bound::set_packed_table, nb::arg("table"), nb::keep_alive<1, 2>())
        .def("set_angles", &Bound::set_angles, nb::arg("cos").noconvert(), nb::arg("sin").noconvert())
        .def("step", &Bound::step, nb::arg("ids"), nb::arg("spans"), nb::arg("logits").noconvert())
        .def("run", &Bound::run, nb::arg("x").noconvert(), nb::arg("positions").noconvert(),
             nb::arg("slots").noconvert(), nb::arg("cos").noconvert(), nb::arg("sin").noconvert(),
             nb::arg("spans").noconvert(), nb::arg("head_rows").noconvert(), nb::arg("logits").noconvert().none());
}

}  // namespace adapt_python

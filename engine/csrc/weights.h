// Packed matrices as Python holds them.
#pragma once

#include <nanobind/stl/optional.h>

#include <optional>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

#include "arrays.h"

namespace adapt_python {

using Optional = std::optional<Constant>;

inline adapt::Format format_at(int code) {
    if (code < 0 || code > 3) refuse("format", "must be 0 float32, 1 bfloat16, 2 float16 or 3 int8");
    return static_cast<adapt::Format>(code);
}

// Streams run faster over large pages; asked for before the memory is touched, and no matter if it is refused.
inline void large_pages(void *data, std::size_t bytes) {
#ifdef MADV_HUGEPAGE
    constexpr std::uintptr_t page = 4096;
    const std::uintptr_t first = (reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page;
    const std::uintptr_t last = (reinterpret_cast<std::uintptr_t>(data) + bytes) / page * page;
    if (last > first + (std::uintptr_t{4} << 20)) madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

// Views of memory that Python owns; the arrays live at least as long.
class Weights {
  public:
    Weights(const Array &storage, const std::optional<Array> &scales, int format, std::size_t count,
            std::size_t columns, std::size_t depth, std::size_t segment)
        : storage_(storage), kept_scales_(scales) {
        const adapt::Format kind = format_at(format);
        if (!columns || !depth || !segment || !count) refuse("shape", "must have no dimension of 0");
        const std::size_t bytes = count * columns * depth * adapt::element_bytes(kind);
        if (storage.ndim() != 1 || storage.itemsize() != 1 || storage.shape(0) != bytes || storage.stride(0) != 1)
            refuse("storage", "must be one dense row of " + std::to_string(bytes) + " bytes");
        if ((kind == adapt::Format::i8) != scales.has_value()) refuse("scales", "belong to int8, and to nothing else");
        if (scales && (scales->ndim() != 2 || scales->dtype() != nb::dtype<float>() || scales->shape(0) != count ||
                       scales->shape(1) != columns || !scales->is_valid()))
            refuse("scales", "must be float32, one for each column of each matrix");
        data_ = static_cast<unsigned char *>(storage.data());
        large_pages(data_, bytes);
        scales_ = scales ? static_cast<float *>(scales->data()) : nullptr;
        stack_ = {adapt::Matrix{kind, columns, depth, segment, data_, scales_}, count};
    }

    const adapt::Stack &stack() const { return stack_; }

    adapt::Matrix at(std::size_t index) const {
        if (index >= stack_.count) refuse("index", "there are " + std::to_string(stack_.count) + " matrices");
        return stack_[index];
    }

    // ``largest``: of each column, the largest magnitude in what the source is a part of; int8 only.
    void pack(const Constant &source, std::size_t index, const Optional &largest) {
        const adapt::Matrix one = at(index);
        if (largest && (!scales_ || largest->ndim() != 1 || largest->dtype() != nb::dtype<float>() ||
                        largest->shape(0) != one.columns || (one.columns > 1 && largest->stride(0) != 1)))
            refuse("largest", "belongs to int8: one dense row of float32, one for each column");
        check_rows("source", source);
        if (source.shape(0) != one.columns || source.shape(1) != one.depth)
            refuse("source", "shape must be [" + std::to_string(one.columns) + ", " + std::to_string(one.depth) + "]");
        if (type_of("source", source) != source_type()) refuse("source", "dtype must be that of the matrix");
        const std::size_t offset = static_cast<std::size_t>(one.data - data_);
        nb::gil_scoped_release released;
        adapt::pack(one, source.data(), static_cast<std::size_t>(source.stride(0)), data_ + offset,
                    scales_ ? scales_ + index * one.columns : nullptr,
                    largest ? static_cast<const float *>(largest->data()) : nullptr);
    }

    void unpack(std::size_t index, const Optional &ids, const Array &out) const {
        const adapt::Matrix one = at(index);
        const adapt::Output to = output_of(out);
        if (to.type != source_type()) refuse("out", "dtype must be that of the matrix");
        const std::int64_t *chosen = nullptr;
        std::size_t count = one.columns;
        if (ids) {
            if (ids->ndim() != 1 || ids->dtype() != nb::dtype<std::int64_t>() ||
                (ids->shape(0) > 1 && ids->stride(0) != 1))
                refuse("ids", "must be one dense row of int64");
            chosen = static_cast<const std::int64_t *>(ids->data());
            count = ids->shape(0);
            for (std::size_t i = 0; i < count; ++i)
                if (chosen[i] < 0 || static_cast<std::size_t>(chosen[i]) >= one.columns)
                    throw nb::index_error("ids: a row that is not there");
        }
        if (out.shape(0) != count || out.shape(1) != one.depth) refuse("out", "shape does not fit");
        nb::gil_scoped_release released;
        adapt::unpack(one, chosen, count, to.data, to.stride);
    }

  private:
    adapt::Type source_type() const {
        const adapt::Format format = stack_.first.format;
        return format == adapt::Format::bf16  ? adapt::Type::bf16
               : format == adapt::Format::f16 ? adapt::Type::f16
                                              : adapt::Type::f32;
    }

    Array storage_;
    std::optional<Array> kept_scales_;
    unsigned char *data_;
    float *scales_;
    adapt::Stack stack_;
};

// Of a row; as many as a combination adds up at once.
constexpr std::size_t most_slots = 64;

inline void check_choice(std::size_t experts, std::size_t chosen, std::size_t groups, std::size_t kept) {
    if (!groups || experts % groups || !kept || kept > groups || (groups > 1 && experts / groups < 2) || !chosen ||
        chosen > kept * (experts / groups))
        refuse("groups", "must divide the experts, hold two or more each, and as many as are chosen");
}

struct Experts {
    const adapt::Stack &gate, &up, &down;
};

inline Experts experts_of(const Weights &gate, const Weights &up, const Weights &down) {
    const adapt::Stack &g = gate.stack(), &u = up.stack(), &d = down.stack();
    if (g.count != u.count || g.count != d.count) refuse("up", "gate, up and down must have as many experts");
    if (g.first.columns != u.first.columns || g.first.depth != u.first.depth || d.first.depth != g.first.columns ||
        d.first.columns != g.first.depth)
        refuse("down", "gate and up must be [inter, hidden], down [hidden, inter]");
    if (g.first.format != u.first.format || g.first.segment != u.first.segment)
        refuse("up", "format and segments must be those of gate");
    if (g.first.format != d.first.format) refuse("down", "format must be that of gate");
    return {g, u, d};
}

}  // namespace adapt_python

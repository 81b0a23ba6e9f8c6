#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "linear.h"

namespace adapt {
namespace {

constexpr std::size_t chunk = 256;
// Rows (queries times the heads that share a key head) that are computed with keys while those are packed.
constexpr std::size_t block = 192;
constexpr int most_levels = 40;

Format format_of(Type type) {
    return type == Type::f32 ? Format::f32 : type == Type::bf16 ? Format::bf16 : Format::f16;
}

// Queries of one sequence and one key head, over all chunks or an aligned run of them.
struct Task {
    const Reading *reading;
    std::size_t group, first, queries;
    std::size_t run, runs;  // of chunks
};

// What rows know of some keys: largest score, sum of exponentials, weighted sum of values.
struct State {
    float *largest, *sum, *mixed;
};

class Worker {
  public:
    Worker(const Kernels &kernels, const Heads &heads, const HeadRows &q, const HeadRows &k, const HeadRows &v,
           std::size_t length, Scratch::Scope &scratch)
        : kernels_(kernels),
          heads_(heads),
          q_(q),
          k_(k),
          v_(v),
          length_(length),
          share_(heads.heads / heads.kv_heads),
          stride_((heads.value_width + 15) / 16 * 16) {
        const Format format = format_of(k.type);
        keys_ = {format, chunk, heads.width, heads.width, nullptr, nullptr};
        values_ = {format, heads.value_width, chunk, chunk, nullptr, nullptr};
        packed_keys_ = scratch.take<unsigned char>(chunk * heads.width * element_bytes(format));
        packed_values_ = scratch.take<unsigned char>(chunk * heads.value_width * element_bytes(format));
        const std::size_t widest = std::max(heads.width, heads.value_width);
        nothing_ = scratch.take<unsigned char>(widest * sizeof(float));
        std::memset(nothing_, 0, widest * sizeof(float));
        shares_ = scratch.take<unsigned char>(most_tile_rows * chunk * sizeof(float));
        scores_ = scratch.take<float>(most_tile_rows * chunk);
        keys_.data = packed_keys_;
        values_.data = packed_values_;
    }

    // State of the task's rows over its chunks; valid while ``scratch`` is.
    State compute(const Task &task, Scratch::Scope &scratch) {
        const std::size_t rows = task.queries * share_;
        const void **given = scratch.take<const void *>(rows);
        for (std::size_t i = 0; i < rows; ++i)
            given[i] = q_.at(task.reading->first + task.first + i / share_, task.group * share_ + i % share_);
        ready_ = prepare(kernels_, q_.type, given, rows, keys_, scratch);
        State stack[most_levels], current = fresh(rows, scratch);
        bool present[most_levels] = {};
        int used = 0;
        const std::size_t first = task.run * length_;
        for (std::size_t index = 0; index < length_; ++index) {
            const std::size_t begin = (first + index) * chunk;
            if (begin > static_cast<std::size_t>(last_position(task))) break;
            const bool found = one_chunk(task, begin, rows, current);
            int level = 0;
            bool held = found;
            for (std::size_t bits = index; bits & 1; bits >>= 1, ++level) {
                if (!present[level]) continue;
                if (held)
                    merge(stack[level], current, rows);
                else
                    std::swap(stack[level], current);
                held = true;
                present[level] = false;
            }
            if (!held) continue;
            for (; used <= level; ++used) stack[used] = fresh(rows, scratch);
            std::swap(stack[level], current);
            present[level] = true;
        }
        bool held = false;
        for (int level = 0; level < used; ++level) {
            if (!present[level]) continue;
            if (held)
                merge(stack[level], current, rows);
            else
                std::swap(stack[level], current);
            held = true;
        }
        if (!held) clear(current, rows);
        return current;
    }

    // ``right`` becomes what both know.
    void merge(const State &left, State &right, std::size_t rows) const {
        for (std::size_t i = 0; i < rows; ++i)
            kernels_.rows.merge(&left.largest[i], &left.sum[i], left.mixed + i * stride_, &right.largest[i],
                                &right.sum[i], right.mixed + i * stride_, heads_.value_width);
    }

  private:
    static constexpr float nothing = -std::numeric_limits<float>::infinity();

    State fresh(std::size_t rows, Scratch::Scope &scratch) const {
        return {scratch.take<float>(rows), scratch.take<float>(rows), scratch.take<float>(rows * stride_)};
    }
    void clear(State &state, std::size_t rows) const {
        std::fill_n(state.largest, rows, nothing);
        std::fill_n(state.sum, rows, 0.0f);
        std::fill_n(state.mixed, rows * stride_, 0.0f);
    }

    static std::int64_t last_position(const Task &task) {
        return task.reading->q_positions[task.first + task.queries - 1];
    }
    // First key at a position of at least ``position``.
    static std::size_t reached(const Reading &reading, std::int64_t position) {
        if (position <= 0) return 0;
        if (!reading.k_positions) return std::min(reading.keys, static_cast<std::size_t>(position));
        return static_cast<std::size_t>(
            std::lower_bound(reading.k_positions, reading.k_positions + reading.keys, position) - reading.k_positions);
    }

    bool one_chunk(const Task &task, std::size_t begin, std::size_t rows, State &state) {
        const Reading &reading = *task.reading;
        const std::int64_t final = last_position(task), start = reading.q_positions[task.first];
        const std::size_t first = reached(reading, static_cast<std::int64_t>(begin));
        const std::size_t last = reached(reading, std::min(static_cast<std::int64_t>(begin + chunk), final + 1));
        if (last <= first) return false;
        if (heads_.window && reached(reading, start - static_cast<std::int64_t>(heads_.window) + 1) >= last)
            return false;
        pack_keys(reading, task.group, first, last - first);
        pack_values(reading, task.group, first, last - first);
        const std::size_t tiles = tiles_of(kernels_, rows);
        for (std::size_t t = 0; t < tiles; ++t) {
            const Range tile = adapt::share(rows, static_cast<int>(t), static_cast<int>(tiles));
            attend(task, first, last - first, tile, state);
        }
        return true;
    }

    void attend(const Task &task, std::size_t first, std::size_t count, Range tile, State &state) {
        const Reading &reading = *task.reading;
        const std::size_t rows = tile.last - tile.first, panels = keys_.panels();
        for (std::size_t p = 0; p < panels; ++p)
            kernels_.products.tile(keys_, p, ready_.x + tile.first, nullptr, rows, 0, 2,
                                   scores_ + p * rows * panel_columns);
        const std::size_t bytes = k_.type == Type::bf16 ? 2 : 4;
        const Type share_type = k_.type == Type::bf16 ? Type::bf16 : Type::f32;
        const void *shares[most_tile_rows];
        for (std::size_t r = 0; r < rows; ++r) {
            const std::size_t row = tile.first + r;
            const std::int64_t at = reading.q_positions[task.first + row / share_];
            const std::size_t high = std::min(reached(reading, at + 1), first + count);
            std::size_t low = first;
            if (heads_.window)
                low = std::max(first, reached(reading, at - static_cast<std::int64_t>(heads_.window) + 1));
            unsigned char *own = shares_ + r * chunk * bytes;
            shares[r] = own;
            if (high <= low) {
                std::memset(own, 0, values_.depth * bytes);
                state.largest[row] = nothing;
                state.sum[row] = 0.0f;
            } else {
                kernels_.rows.shares(share_type, scores_ + r * panel_columns, rows * panel_columns, low - first,
                                     high - first, values_.depth, heads_.scale, own, &state.largest[row],
                                     &state.sum[row]);
            }
        }
        alignas(64) float found[most_tile_rows * panel_columns];
        for (std::size_t p = 0; p < values_.panels(); ++p) {
            kernels_.products.tile(values_, p, shares, nullptr, rows, 0, 2, found);
            const std::size_t column = p * panel_columns, width = values_.width(p) * sizeof(float);
            for (std::size_t r = 0; r < rows; ++r)
                std::memcpy(state.mixed + (tile.first + r) * stride_ + column, found + r * panel_columns, width);
        }
    }

    const void *row_of(const HeadRows &rows, const Reading &reading, std::size_t group, std::size_t key) const {
        return rows.at(reading.slots ? static_cast<std::size_t>(reading.slots[key]) : key, group);
    }

    // Keys are columns: whole panels, of which those beyond the last key are zero.
    void pack_keys(const Reading &reading, std::size_t group, std::size_t first, std::size_t count) {
        keys_.columns = (count + panel_columns - 1) / panel_columns * panel_columns;
        const std::size_t unit = group_of(keys_.format) * element_bytes(keys_.format);
        const std::size_t units = heads_.width / group_of(keys_.format), tail = heads_.width % group_of(keys_.format);
        for (std::size_t c = 0; c < keys_.columns; c += lanes) {
            const void *rows[lanes];
            for (std::size_t i = 0; i < lanes; ++i)
                rows[i] = c + i < count ? row_of(k_, reading, group, first + c + i) : nothing_;
            unsigned char *to = packed_keys_ + keys_.panel_offset(c / panel_columns) + c % panel_columns * unit;
            kernels_.products.transpose(rows, unit, units, to, panel_columns * unit);
            if (tail) {
                const std::size_t bytes = element_bytes(keys_.format);
                unsigned char *end = packed_keys_ + keys_.panel_offset(c / panel_columns) +
                                     units * unit * panel_columns + c % panel_columns * bytes;
                for (std::size_t i = 0; i < lanes; ++i)
                    std::memcpy(end + i * bytes, static_cast<const char *>(rows[i]) + units * unit, bytes);
            }
        }
    }

    // Keys are depth; a group that the last key does not fill ends with zeros.
    void pack_values(const Reading &reading, std::size_t group, std::size_t first, std::size_t count) {
        const std::size_t deep = group_of(values_.format);
        values_.depth = (count + deep - 1) / deep * deep;
        values_.segment = values_.depth;
        for (std::size_t k = 0; k < values_.depth; k += deep) {
            const void *rows[2] = {row_of(v_, reading, group, first + k), nothing_};
            if (deep == 2 && k + 1 < count) rows[1] = row_of(v_, reading, group, first + k + 1);
            for (std::size_t p = 0; p < values_.panels(); ++p) {
                const std::size_t width = values_.width(p), bytes = element_bytes(values_.format);
                unsigned char *to = packed_values_ + values_.panel_offset(p) + k * width * bytes;
                const std::size_t offset = p * panel_columns * bytes;
                if (deep == 1)
                    std::memcpy(to, static_cast<const char *>(rows[0]) + offset, width * bytes);
                else
                    kernels_.products.interleave(static_cast<const char *>(rows[0]) + offset,
                                                 static_cast<const char *>(rows[1]) + offset, width, to);
            }
        }
    }

    static constexpr std::size_t lanes = 16;
    const Kernels &kernels_;
    const Heads &heads_;
    const HeadRows &q_, &k_, &v_;
    std::size_t length_;
    std::size_t share_, stride_;
    Matrix keys_, values_;
    unsigned char *packed_keys_, *packed_values_, *nothing_, *shares_;
    float *scores_;
    Prepared ready_{};
};

}  // namespace

void attention(const Kernels &kernels, const Heads &heads, const HeadRows &q, const HeadRows &k, const HeadRows &v,
               const Reading *readings, std::size_t count, Type out_type, void *out, float *weights) {
    const std::size_t share_heads = heads.heads / heads.kv_heads, most = static_cast<std::size_t>(threads());
    const std::size_t queries = std::max<std::size_t>(1, block / share_heads);
    Scratch::Scope scratch;

    // Chunks are run through in one go where there are enough blocks of rows to keep every thread busy; otherwise in
    // aligned runs of a power of two, which are whole subtrees, so that the sums are the same.
    std::size_t blocks = 0, chunks = 1;
    for (std::size_t i = 0; i < count; ++i) {
        const Reading &one = readings[i];
        if (!one.rows) continue;
        blocks += (one.rows + queries - 1) / queries * heads.kv_heads;
        chunks = std::max(chunks, static_cast<std::size_t>(one.q_positions[one.rows - 1]) / chunk + 1);
    }
    std::size_t length = 1;
    while (length < chunks) length *= 2;
    while (length > 1 && blocks * ((chunks + length - 1) / length) < 4 * most) length /= 2;

    Task *tasks = scratch.take<Task>(blocks * ((chunks + length - 1) / length));
    std::size_t total = 0;
    for (std::size_t i = 0; i < count; ++i)
        for (std::size_t first = 0; first < readings[i].rows; first += queries)
            for (std::size_t group = 0; group < heads.kv_heads; ++group) {
                const std::size_t rows = std::min(queries, readings[i].rows - first);
                const auto last = static_cast<std::size_t>(readings[i].q_positions[first + rows - 1]);
                const std::size_t runs = last / (chunk * length) + 1;
                for (std::size_t run = 0; run < runs; ++run)
                    tasks[total++] = {&readings[i], group, first, rows, run, runs};
            }

    const std::size_t stride = (heads.value_width + 15) / 16 * 16;
    State *kept = scratch.take<State>(total);
    for (std::size_t t = 0; t < total; ++t) {
        const std::size_t rows = tasks[t].queries * share_heads;
        if (tasks[t].runs > 1)
            kept[t] = {scratch.take<float>(rows), scratch.take<float>(rows), scratch.take<float>(rows * stride)};
    }
    const auto finish = [&](const Task &task, const State &state) {
        for (std::size_t i = 0; i < task.queries * share_heads; ++i) {
            const std::size_t row = task.reading->first + task.first + i / share_heads;
            const std::size_t at = row * heads.heads + task.group * share_heads + i % share_heads;
            kernels.rows.divide(out_type, state.mixed + i * stride, state.sum[i],
                                static_cast<char *>(out) + at * heads.value_width * bytes_of(out_type),
                                heads.value_width);
            if (weights)
                weights[at] = state.sum[i] == 0.0f ? -std::numeric_limits<float>::infinity()
                                                   : state.largest[i] + std::log(state.sum[i]);
        }
    };
    const auto parts = [&](std::size_t units) { return static_cast<int>(std::min(units, most)); };
    parallel(parts(total), [&](int part, int all) {
        Scratch::Scope own;
        Worker worker(kernels, heads, q, k, v, length, own);
        // In turn: later rows of a sequence see more keys than earlier ones.
        for (std::size_t t = static_cast<std::size_t>(part); t < total; t += static_cast<std::size_t>(all)) {
            Scratch::Scope inner;
            const State state = worker.compute(tasks[t], inner);
            const std::size_t rows = tasks[t].queries * share_heads;
            if (tasks[t].runs == 1) {
                finish(tasks[t], state);
                continue;
            }
            std::copy_n(state.largest, rows, kept[t].largest);
            std::copy_n(state.sum, rows, kept[t].sum);
            std::copy_n(state.mixed, rows * stride, kept[t].mixed);
        }
    });
    if (length >= chunks) return;
    // The runs of a block, along the same tree.
    parallel(parts(blocks), [&](int part, int all) {
        Scratch::Scope own;
        const Worker worker(kernels, heads, q, k, v, length, own);
        std::size_t index = 0;
        for (std::size_t t = 0; t < total; t += tasks[t].runs, ++index) {
            if (tasks[t].runs == 1 || index % static_cast<std::size_t>(all) != static_cast<std::size_t>(part)) continue;
            const std::size_t rows = tasks[t].queries * share_heads;
            for (std::size_t span = 1; span < tasks[t].runs; span *= 2)
                for (std::size_t left = 0; left + span < tasks[t].runs; left += 2 * span) {
                    worker.merge(kept[t + left], kept[t + left + span], rows);
                    std::swap(kept[t + left], kept[t + left + span]);
                }
            finish(tasks[t], kept[t]);
        }
    });
}

}  // namespace adapt

// Routed experts: slots are sorted by expert (a stable counting sort), so that every expert's weights are read once.
#include <cstring>

#include "linear.h"

namespace adapt {
namespace {

// Slots grouped by expert: order[offsets[e] .. offsets[e + 1]) are those of expert e, ascending.
struct Groups {
    std::size_t *offsets, *order;
};

Groups group(const std::int64_t *ids, std::size_t count, std::size_t experts, Scratch::Scope &scratch) {
    Groups found{scratch.take<std::size_t>(experts + 1), scratch.take<std::size_t>(count)};
    std::size_t *next = scratch.take<std::size_t>(experts + 1);
    std::memset(next, 0, (experts + 1) * sizeof *next);
    for (std::size_t i = 0; i < count; ++i) ++next[ids[i] + 1];
    for (std::size_t e = 0; e < experts; ++e) next[e + 1] += next[e];
    std::memcpy(found.offsets, next, (experts + 1) * sizeof *next);
    for (std::size_t i = 0; i < count; ++i) found.order[next[ids[i]]++] = i;
    return found;
}

// Panels of the experts that have rows, cut so that every part has about the same work. Reading a panel costs as much
// as computing some rows with it.
class Units {
  public:
    Units(const Groups &groups, std::size_t experts, std::size_t panels, Scratch::Scope &scratch)
        : panels_(panels), active_(scratch.take<std::size_t>(experts)), cost_(scratch.take<std::size_t>(experts + 1)) {
        cost_[0] = 0;
        for (std::size_t e = 0; e < experts; ++e) {
            const std::size_t rows = groups.offsets[e + 1] - groups.offsets[e];
            if (!rows) continue;
            active_[count_] = e;
            cost_[count_ + 1] = cost_[count_] + (rows < reading ? reading : rows) * panels;
            ++count_;
        }
    }

    std::size_t size() const { return count_ * panels_; }

    // f(expert, panel) for the units whose middle lies in this part of the whole cost.
    template <class F>
    void each(int part, int parts, F &&f) const {
        const std::size_t whole = cost_[count_], count = static_cast<std::size_t>(parts);
        const std::size_t low = whole * static_cast<std::size_t>(part), high = low + whole;
        for (std::size_t a = 0; a < count_; ++a) {
            const std::size_t one = (cost_[a + 1] - cost_[a]) / panels_;
            for (std::size_t p = 0; p < panels_; ++p) {
                const std::size_t middle = (cost_[a] + one * p + one / 2) * count;
                if (low <= middle && middle < high) f(active_[a], p);
            }
        }
    }

  private:
    static constexpr std::size_t reading = 12;
    std::size_t panels_, count_ = 0;
    std::size_t *active_, *cost_;
};

int parts_for(const Units &units) {
    const std::size_t most = static_cast<std::size_t>(threads());
    return static_cast<int>(units.size() < most ? units.size() : most);
}

}  // namespace

void expert_rows(const Kernels &kernels, const Input &x, const std::int64_t *ids, std::size_t count, std::size_t slots,
                 const Stack &gate, const Stack &up, const Stack &down, const Output &out) {
    if (!count) return;
    Scratch::Scope scratch;
    const Groups groups = group(ids, count, gate.count, scratch);
    const std::size_t inter = gate.first.columns, bytes = bytes_of(x.type);

    // Rows are brought into the matrices' format once, however many experts read them.
    const std::size_t rows = count / slots;
    const void **given = scratch.take<const void *>(rows);
    for (std::size_t i = 0; i < rows; ++i) given[i] = x.row(i);
    const Prepared own = prepare(kernels, x.type, given, rows, gate.first, scratch);
    const void **sorted = scratch.take<const void *>(count);
    const std::int32_t **sums = own.sums ? scratch.take<const std::int32_t *>(count) : nullptr;
    float *scales = own.scales ? scratch.take<float>(count) : nullptr;
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t row = groups.order[i] / slots;
        sorted[i] = own.x[row];
        if (sums) sums[i] = own.sums[row];
        if (scales) scales[i] = own.scales[row];
    }
    const Prepared entering{sorted, sums, scales};

    // Rows of activations start on cache lines of their own.
    const std::size_t stride = (inter * bytes + 63) / 64 * 64;
    char *activations = scratch.take<char>(count * stride);
    const Units inner(groups, gate.count, gate.first.panels(), scratch);
    parallel(parts_for(inner), [&](int part, int parts) {
        inner.each(part, parts, [&](std::size_t expert, std::size_t panel) {
            const Matrix g = gate[expert], u = up[expert];
            const std::size_t column = panel * panel_columns, width = g.width(panel);
            const float *g_scales = g.scales ? g.scales + column : nullptr;
            const float *u_scales = u.scales ? u.scales + column : nullptr;
            const std::size_t length = groups.offsets[expert + 1] - groups.offsets[expert];
            // Both halves of a tile, while the activations that they came from are at hand.
            alignas(64) float halves[2][most_tile_rows * panel_columns];
            const std::size_t tiles = tiles_of(kernels, length);
            for (std::size_t t = 0; t < tiles; ++t) {
                const Range tile = share(length, static_cast<int>(t), static_cast<int>(tiles));
                const std::size_t first = groups.offsets[expert] + tile.first, size = tile.last - tile.first;
                const std::int32_t *const *tile_sums = sums ? sums + first : nullptr;
                kernels.products.tile(g, panel, entering.x + first, tile_sums, size, t, tiles, halves[0]);
                kernels.products.tile(u, panel, entering.x + first, tile_sums, size, t, tiles, halves[1]);
                for (std::size_t r = 0; r < size; ++r)
                    kernels.rows.gated(x.type, halves[0] + r * panel_columns, halves[1] + r * panel_columns, g_scales,
                                       u_scales, scales ? scales[first + r] : 1.0f,
                                       activations + (first + r) * stride + column * bytes, width);
            }
        });
    });

    const void **acts = scratch.take<const void *>(count);
    for (std::size_t i = 0; i < count; ++i) acts[i] = activations + i * stride;
    const Prepared leaving = prepare(kernels, x.type, acts, count, down.first, scratch);
    const Units outer(groups, down.count, down.first.panels(), scratch);
    parallel(parts_for(outer), [&](int part, int parts) {
        outer.each(part, parts, [&](std::size_t expert, std::size_t panel) {
            const Matrix d = down[expert];
            const std::size_t column = panel * panel_columns, width = d.width(panel);
            const Range range{groups.offsets[expert], groups.offsets[expert + 1]};
            each_tile(kernels, d, panel, leaving, range, [&](std::size_t i, const float *found) {
                kernels.rows.finish(out.type, found, d.scales ? d.scales + column : nullptr,
                                    leaving.scales ? leaving.scales[i] : 1.0f, nullptr,
                                    static_cast<char *>(out.row(groups.order[i])) + column * bytes_of(out.type), width);
            });
        });
    });
}

void combine(const Kernels &kernels, const Input &down, const float *weights, std::size_t slots, std::size_t width,
             const Output &out) {
    constexpr std::size_t piece = 256;
    const std::size_t rows = down.rows / slots, pieces = (width + piece - 1) / piece, units = rows * pieces;
    const std::size_t most = static_cast<std::size_t>(threads());
    parallel(static_cast<int>(units < most ? units : most), [&](int part, int parts) {
        const Range range = share(units, part, parts);
        for (std::size_t unit = range.first; unit < range.last; ++unit) {
            const std::size_t row = unit / pieces, column = unit % pieces * piece;
            const void *parts_of[64];
            const std::size_t bytes = bytes_of(down.type);
            for (std::size_t s = 0; s < slots; ++s)
                parts_of[s] = static_cast<const char *>(down.row(row * slots + s)) + column * bytes;
            kernels.rows.combine(down.type, parts_of, weights + row * slots, slots,
                                 static_cast<char *>(out.row(row)) + column * bytes,
                                 width - column < piece ? width - column : piece);
        }
    });
}

void experts(const Kernels &kernels, const Input &x, const std::int64_t *ids, const float *weights, std::size_t slots,
             const Stack &gate, const Stack &up, const Stack &down, const Output &out) {
    if (!x.rows) return;
    Scratch::Scope scratch;
    const std::size_t hidden = down.first.columns, count = x.rows * slots;
    const std::size_t stride = (hidden * bytes_of(x.type) + 63) / 64 * 64 / bytes_of(x.type);
    char *rows = scratch.take<char>(count * stride * bytes_of(x.type));
    expert_rows(kernels, x, ids, count, slots, gate, up, down, Output{x.type, rows, stride});
    combine(kernels, Input{x.type, rows, count, stride}, weights, slots, hidden, out);
}

}  // namespace adapt

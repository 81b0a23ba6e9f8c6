// The choice of experts, row by row: scores, groups, a total order, weights.
#include <algorithm>
#include <cmath>
#include <limits>

#include "linear.h"

namespace adapt {
namespace {

constexpr float nothing = -std::numeric_limits<float>::infinity();

// Indices of the ``count`` largest values, the lowest index first among equals, in that order.
void best(const float *values, std::size_t length, std::size_t count, std::int64_t *found) {
    std::size_t held = 0;
    for (std::size_t i = 0; i < length; ++i) {
        if (held == count && !(values[i] > values[found[held - 1]])) continue;
        std::size_t at = held < count ? held++ : held - 1;
        for (; at > 0 && values[i] > values[found[at - 1]]; --at) found[at] = found[at - 1];
        found[at] = static_cast<std::int64_t>(i);
    }
}

void route_row(const Kernels &kernels, const float *logits, const float *bias, const Choice &choice, float *scores,
               float *selection, float *eligible, float *strengths, std::int64_t *groups, std::int64_t *ids,
               float *weights) {
    const std::size_t experts = choice.experts;
    (choice.softmax ? kernels.rows.softmax : kernels.rows.sigmoid)(logits, scores, experts);
    for (std::size_t e = 0; e < experts; ++e) {
        const float value = bias ? scores[e] + bias[e] : scores[e];
        if (selection) selection[e] = value;
        eligible[e] = std::isnan(value) ? nothing : value;
    }
    if (choice.groups > 1) {
        const std::size_t size = experts / choice.groups;
        for (std::size_t g = 0; g < choice.groups; ++g) {
            std::int64_t two[2] = {0, 0};
            best(eligible + g * size, size, 2, two);
            strengths[g] = eligible[g * size + static_cast<std::size_t>(two[0])] +
                           eligible[g * size + static_cast<std::size_t>(two[1])];
            if (std::isnan(strengths[g])) strengths[g] = nothing;
        }
        best(strengths, choice.groups, choice.kept_groups, groups);
        std::sort(groups, groups + choice.kept_groups);
        for (std::size_t g = 0, kept = 0; g < choice.groups; ++g) {
            if (kept < choice.kept_groups && static_cast<std::size_t>(groups[kept]) == g)
                ++kept;
            else
                std::fill_n(eligible + g * size, size, nothing);
        }
    }
    best(eligible, experts, choice.chosen, ids);
    std::sort(ids, ids + choice.chosen);
    float total = 0.0f;
    for (std::size_t k = 0; k < choice.chosen; ++k) {
        weights[k] = scores[ids[k]];
        total += weights[k];
    }
    // 1e-20 is the published guard of the sigmoid form; a softmax sum cannot vanish.
    if (!choice.softmax) total += 1e-20f;
    for (std::size_t k = 0; k < choice.chosen; ++k) {
        if (choice.renormalise) weights[k] /= total;
        weights[k] *= choice.scale;
    }
}

}  // namespace

void route(const Kernels &kernels, const float *logits, std::size_t rows, std::size_t stride, const float *bias,
           const Choice &choice, float *scores, float *selection, std::int64_t *ids, float *weights) {
    // A row takes about a microsecond: fewer than these are done before another thread has heard of them.
    constexpr std::size_t few = 16;
    parallel(rows < few ? 1 : threads(), [&](int part, int parts) {
        Scratch::Scope scratch;
        float *own = scores ? nullptr : scratch.take<float>(choice.experts);
        float *eligible = scratch.take<float>(choice.experts), *strengths = scratch.take<float>(choice.groups);
        std::int64_t *groups = scratch.take<std::int64_t>(choice.groups);
        const Range range = share(rows, part, parts);
        for (std::size_t i = range.first; i < range.last; ++i)
            route_row(kernels, logits + i * stride, bias, choice, scores ? scores + i * choice.experts : own,
                      selection ? selection + i * choice.experts : nullptr, eligible, strengths, groups,
                      ids + i * choice.chosen, weights + i * choice.chosen);
    });
}

}  // namespace adapt

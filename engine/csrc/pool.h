// One pool of threads for the process. A job is cut into parts beforehand; the caller computes part 0.
#pragma once

#include <cstddef>
#include <type_traits>

namespace adapt {

// Parts that jobs of this process are cut into, the caller included; at least 1.
void set_threads(int count);
int threads();

using Part = void (*)(void *job, int part, int parts);

// part(job, i, parts) for every i < parts, on as many threads; returns when all are done. Where a job is being
// computed already, by another thread or around this one, the caller computes all parts itself, one after the other:
// the same parts, the same results.
void run_parts(int parts, Part part, void *job);

// f(part, parts) on ``parts`` threads.
template <class F>
void parallel(int parts, F &&f) {
    if (parts <= 1) return f(0, 1);
    run_parts(
        parts, [](void *job, int part, int count) { (*static_cast<std::remove_reference_t<F> *>(job))(part, count); },
        &f);
}

// Borders of an even static split of ``units``: [first, last) for one part.
struct Range {
    std::size_t first, last;
};
inline Range share(std::size_t units, int part, int parts) {
    return {units * static_cast<std::size_t>(part) / static_cast<std::size_t>(parts),
            units * static_cast<std::size_t>(part + 1) / static_cast<std::size_t>(parts)};
}

}  // namespace adapt

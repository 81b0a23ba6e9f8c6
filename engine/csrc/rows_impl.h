// The row kernels once, over a vector type V that each translation unit supplies:
//   width, zero, set, load<T>, store<T>, round<T>, + * /, negated, sum, exp; load_tail and store_tail treat the last
//   n < width elements of a row.
// Everything has internal linkage: the same names exist under other instruction sets in other files.
#pragma once

#include <cmath>

#include "rows.h"

namespace adapt {
namespace {

template <class V, class T>
void rms_norm_row(const T *x, const T *weight, T *out, std::size_t width, float eps) {
    const std::size_t whole = width / V::width * V::width;
    const std::size_t tail = width - whole;
    V total = V::zero();
    for (std::size_t i = 0; i < whole; i += V::width) {
        const V v = V::template load<T>(x + i);
        total = total + v * v;
    }
    if (tail) {
        const V v = V::template load_tail<T>(x + whole, tail);
        total = total + v * v;
    }
    const float mean = total.sum() / static_cast<float>(width);
    const V scale = V::set(1.0f / std::sqrt(mean + eps));
    for (std::size_t i = 0; i < whole; i += V::width) {
        const V normed = (V::template load<T>(x + i) * scale).template round<T>();
        (V::template load<T>(weight + i) * normed).template store<T>(out + i);
    }
    if (tail) {
        const V normed = (V::template load_tail<T>(x + whole, tail) * scale).template round<T>();
        (V::template load_tail<T>(weight + whole, tail) * normed).template store_tail<T>(out + whole, tail);
    }
}

// exp(x) = 2^n * p(r), n = round(x / ln 2), |r| <= ln 2 / 2; ln 2 in two parts and the degree-5 minimax polynomial
// are those of Cephes' expf (S. Moshier). V supplies clamp, nearest, times_pow2 and multiply-add.
template <class V>
ADAPT_INLINE V exp_of(V x) {
    // Beyond 88.73 the result is infinite, as it should be; below -87.3 it would leave the normal numbers.
    x = x.clamp(-87.3f, 89.0f);
    const V n = (x * V::set(1.44269504088896341f)).nearest();
    const V r = V::fma(n, V::set(2.12194440e-4f), V::fma(n, V::set(-0.693359375f), x));
    V p = V::set(1.9875691500e-4f);
    p = V::fma(p, r, V::set(1.3981999507e-3f));
    p = V::fma(p, r, V::set(8.3334519073e-3f));
    p = V::fma(p, r, V::set(4.1665795894e-2f));
    p = V::fma(p, r, V::set(1.6666665459e-1f));
    p = V::fma(p, r, V::set(5.0000001201e-1f));
    p = V::fma(p, r * r, r + V::set(1.0f));
    return p.times_pow2(n);
}

template <class V>
ADAPT_INLINE V silu_times(V gate, V up) {
    return gate / (V::set(1.0f) + gate.negated().exp()) * up;
}

template <class V, class T>
void swiglu_row(const T *gate, const T *up, T *out, std::size_t width) {
    const std::size_t whole = width / V::width * V::width;
    const std::size_t tail = width - whole;
    for (std::size_t i = 0; i < whole; i += V::width)
        silu_times(V::template load<T>(gate + i), V::template load<T>(up + i)).template store<T>(out + i);
    if (tail)
        silu_times(V::template load_tail<T>(gate + whole, tail), V::template load_tail<T>(up + whole, tail))
            .template store_tail<T>(out + whole, tail);
}

template <class V>
ADAPT_INLINE V turned(V kept, V cosine, V other, V sine) {
    return kept * cosine + other * sine;
}

template <class V, class T>
void rotate_row(const T *x, const float *cosines, const float *sines, T *out, std::size_t half) {
    const std::size_t whole = half / V::width * V::width;
    const std::size_t tail = half - whole;
    for (std::size_t i = 0; i < whole; i += V::width) {
        const V first = V::template load<T>(x + i), second = V::template load<T>(x + half + i);
        const V cosine = V::template load<float>(cosines + i), sine = V::template load<float>(sines + i);
        turned(first, cosine, second.negated(), sine).template store<T>(out + i);
        turned(second, cosine, first, sine).template store<T>(out + half + i);
    }
    if (tail) {
        const V first = V::template load_tail<T>(x + whole, tail),
                second = V::template load_tail<T>(x + half + whole, tail);
        const V cosine = V::template load_tail<float>(cosines + whole, tail);
        const V sine = V::template load_tail<float>(sines + whole, tail);
        turned(first, cosine, second.negated(), sine).template store_tail<T>(out + whole, tail);
        turned(second, cosine, first, sine).template store_tail<T>(out + half + whole, tail);
    }
}

// f(offset, n) for vectors of a row, the last one with n < V::width elements where the width is no multiple.
template <class V, class F>
ADAPT_INLINE void each_vector(std::size_t width, F &&f) {
    std::size_t i = 0;
    for (; i + V::width <= width; i += V::width) f(i, V::width);
    if (i < width) f(i, width - i);
}

template <class V, class T>
ADAPT_INLINE V take(const T *p, std::size_t n) {
    return n == V::width ? V::template load<T>(p) : V::template load_tail<T>(p, n);
}

template <class V, class T>
ADAPT_INLINE void put(V v, T *p, std::size_t n) {
    if (n == V::width)
        v.template store<T>(p);
    else
        v.template store_tail<T>(p, n);
}

template <class V, class T>
void finish_row(const float *sums, const float *scales, float scale, const float *bias, T *out, std::size_t width) {
    each_vector<V>(width, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
        V v = take<V>(sums + i, n);
        if (scales) v = v * V::set(scale) * take<V>(scales + i, n);
        if (bias) v = v + take<V>(bias + i, n);
        put(v, out + i, n);
    });
}

template <class V, class T>
void gated_row(const float *gate, const float *up, const float *gate_scales, const float *up_scales, float scale,
               T *out, std::size_t width) {
    each_vector<V>(width, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
        V g = take<V>(gate + i, n), u = take<V>(up + i, n);
        if (gate_scales) {
            g = g * V::set(scale) * take<V>(gate_scales + i, n);
            u = u * V::set(scale) * take<V>(up_scales + i, n);
        }
        put(silu_times(g.template round<T>(), u.template round<T>()), out + i, n);
    });
}

template <class V, class T>
void widen_row(const T *x, float *out, std::size_t width) {
    each_vector<V>(width, [&](std::size_t i, std::size_t n)
                              __attribute__((always_inline)) { put(take<V>(x + i, n), out + i, n); });
}

template <class V, class T>
void combine_row(const T *const *rows, const float *weights, std::size_t count, T *out, std::size_t width) {
    each_vector<V>(width, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
        V total = take<V>(rows[0] + i, n) * V::set(weights[0]);
        for (std::size_t r = 1; r < count; ++r) total = total + take<V>(rows[r] + i, n) * V::set(weights[r]);
        put(total, out + i, n);
    });
}

template <class V, class T>
void add_row(const T *a, const T *b, T *out, std::size_t width) {
    each_vector<V>(width, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
        put(take<V>(a + i, n) + take<V>(b + i, n), out + i, n);
    });
}

// Plain loops that every compiler turns into vectors: magnitudes are compared as integers, rounding is an addition.
inline float quantise_row(const float *__restrict x, std::int8_t *__restrict out, std::int32_t *__restrict sums,
                          std::size_t width, std::size_t segment, float least) {
    std::uint32_t largest = float_to_bits(least) & 0x7fffffffu;
    for (std::size_t i = 0; i < width; ++i) {
        const std::uint32_t magnitude = float_to_bits(x[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const float top = bits_to_float(largest);
    if (largest >= 0x7f800000u) {
        // Nothing of such a row may look right: its scale is NaN.
        std::memset(out, 0, width);
        std::memset(sums, 0, (width + segment - 1) / segment * sizeof *sums);
        return bits_to_float(0x7fc00000u);
    }
    // The reciprocal of a subnormal number could be infinite: such a row is zero.
    const float inverse = top >= 1.17549435e-38f ? 127.0f / top : 0.0f;
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    for (std::size_t begin = 0, s = 0; begin < width; begin += segment, ++s) {
        const std::size_t end = begin + segment < width ? begin + segment : width;
        std::int32_t sum = 0;
        for (std::size_t i = begin; i < end; ++i) {
            const float scaled = x[i] * inverse + magic;
            const std::int32_t q = static_cast<std::int32_t>(float_to_bits(scaled) - 0x4b400000u);
            out[i] = static_cast<std::int8_t>(q);
            sum += q;
        }
        sums[s] = sum;
    }
    return top / 127.0f;
}

template <class V>
void softmax_row(const float *logits, float *out, std::size_t width) {
    float largest = logits[0];
    for (std::size_t i = 1; i < width; ++i) largest = logits[i] > largest ? logits[i] : largest;
    const V shift = V::set(-largest);
    float total = 0.0f;
    each_vector<V>(width, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
        const V e = (take<V>(logits + i, n) + shift).exp();
        put(e, out + i, n);
        // What lies beyond the row counts nothing: sum what was stored.
        total += n == V::width ? e.sum() : 0.0f;
        if (n < V::width)
            for (std::size_t j = i; j < i + n; ++j) total += out[j];
    });
    for (std::size_t i = 0; i < width; ++i) out[i] /= total;
}

template <class V>
void sigmoid_row(const float *logits, float *out, std::size_t width) {
    each_vector<V>(width, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
        put(V::set(1.0f) / (V::set(1.0f) + take<V>(logits + i, n).negated().exp()), out + i, n);
    });
}

template <class V>
std::int64_t greedy_row(const float *logits, std::size_t width) {
    const std::size_t whole = width / V::width * V::width;
    // Zero times what is not finite is NaN, and stays.
    V top = V::set(-INFINITY), doubt = V::zero();
    const V nothing = V::zero();
    for (std::size_t i = 0; i < whole; i += V::width) {
        const V v = V::template load<float>(logits + i);
        top = V::larger(top, v);
        doubt = doubt + v * nothing;
    }
    float lane[V::width], most = -INFINITY, bad = doubt.sum();
    top.template store<float>(lane);
    for (std::size_t i = 0; i < V::width; ++i) most = lane[i] > most ? lane[i] : most;
    for (std::size_t i = whole; i < width; ++i) {
        most = logits[i] > most ? logits[i] : most;
        bad += logits[i] * 0.0f;
    }
    if (!(bad == 0.0f)) return -1;
    std::size_t found = 0;
    while (logits[found] != most) ++found;
    return static_cast<std::int64_t>(found);
}

// exp in a float32 that no vector surrounds, with the same bits as in one.
template <class V>
float exp_one(float x) {
    const V e = V::template load_tail<float>(&x, 1).exp();
    e.template store_tail<float>(&x, 1);
    return x;
}

template <class V, class T>
void shares_row(float *scores, std::size_t stride, std::size_t low, std::size_t high, std::size_t depth, float scale,
                T *out, float *largest, float *sum) {
    constexpr std::size_t piece = 64;
    static_assert(piece % V::width == 0, "a vector lies within a piece");
    const std::size_t first = low / V::width * V::width, last = (high + V::width - 1) / V::width * V::width;
    const auto at = [=](std::size_t i) { return scores + i / piece * stride + i % piece; };
    // Keys that share a vector with visible ones are out of the way of the largest.
    for (std::size_t i = first; i < low; ++i) *at(i) = -INFINITY;
    for (std::size_t i = high; i < last; ++i) *at(i) = -INFINITY;
    const V factor = V::set(scale);
    V top = V::set(-INFINITY);
    for (std::size_t i = first; i < last; i += V::width) {
        const V v = V::template load<float>(at(i)) * factor;
        v.template store<float>(at(i));
        top = V::larger(top, v);
    }
    float lane[V::width], most = -INFINITY;
    top.template store<float>(lane);
    for (std::size_t i = 0; i < V::width; ++i) most = lane[i] > most ? lane[i] : most;
    // Where all visible scores are -infinity nothing is subtracted: the exponentials are 0, not NaN.
    const V shift = V::set(most == -INFINITY ? 0.0f : -most);
    V total = V::zero();
    for (std::size_t i = 0; i < first && i < depth; ++i) out[i] = from_float<T>(0.0f);
    for (std::size_t i = first; i < last; i += V::width) {
        V e = (V::template load<float>(at(i)) + shift).exp();
        if (i < low || i + V::width > high) {
            e.template store<float>(lane);
            for (std::size_t j = 0; j < V::width; ++j)
                if (i + j < low || i + j >= high) lane[j] = 0.0f;
            e = V::template load<float>(lane);
        }
        total = total + e;
        put(e, out + i, i + V::width <= depth ? V::width : depth - i);
    }
    for (std::size_t i = last; i < depth; ++i) out[i] = from_float<T>(0.0f);
    *largest = most;
    *sum = total.sum();
}

template <class V>
void merge_row(const float *largest, const float *sum, const float *mixed, float *right_largest, float *right_sum,
               float *right_mixed, std::size_t width) {
    // Who knows nothing changes nothing, down to the sign of a zero.
    if (*sum == 0.0f && *largest == -INFINITY) return;
    if (*right_sum == 0.0f && *right_largest == -INFINITY) {
        *right_largest = *largest;
        *right_sum = *sum;
        std::memcpy(right_mixed, mixed, width * sizeof *mixed);
        return;
    }
    const float most = *largest > *right_largest ? *largest : *right_largest;
    const float shift = most == -INFINITY ? 0.0f : most;
    const float left = exp_one<V>(*largest - shift), right = exp_one<V>(*right_largest - shift);
    *right_largest = most;
    *right_sum = *sum * left + *right_sum * right;
    each_vector<V>(width, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
        put(take<V>(mixed + i, n) * V::set(left) + take<V>(right_mixed + i, n) * V::set(right), right_mixed + i, n);
    });
}

template <class V, class T>
void divide_row(const float *mixed, float sum, T *out, std::size_t width) {
    const V by = V::set(sum == 0.0f ? 1.0f : sum);
    each_vector<V>(width, [&](std::size_t i, std::size_t n) __attribute__((always_inline)) {
        put(sum == 0.0f ? V::zero() : take<V>(mixed + i, n) / by, out + i, n);
    });
}

template <class T>
const T *as(const void *p) {
    return static_cast<const T *>(p);
}
template <class T>
T *as(void *p) {
    return static_cast<T *>(p);
}

template <class V>
RowKernels kernels_over() {
    RowKernels k;
    k.rms_norm = [](Type type, const void *x, const void *weight, void *out, std::size_t width, float eps) {
        visit(type, [=](auto t) {
            using T = decltype(t);
            rms_norm_row<V, T>(as<T>(x), as<T>(weight), as<T>(out), width, eps);
        });
    };
    k.swiglu = [](Type type, const void *gate, const void *up, void *out, std::size_t width) {
        visit(type, [=](auto t) {
            using T = decltype(t);
            swiglu_row<V, T>(as<T>(gate), as<T>(up), as<T>(out), width);
        });
    };
    k.rotate = [](Type type, const void *x, const float *cosines, const float *sines, void *out, std::size_t half) {
        visit(type, [=](auto t) {
            using T = decltype(t);
            rotate_row<V, T>(as<T>(x), cosines, sines, as<T>(out), half);
        });
    };
    k.finish = [](Type type, const float *sums, const float *scales, float scale, const float *bias, void *out,
                  std::size_t width) {
        visit(type, [=](auto t) { finish_row<V>(sums, scales, scale, bias, as<decltype(t)>(out), width); });
    };
    k.gated = [](Type type, const float *gate, const float *up, const float *gate_scales, const float *up_scales,
                 float scale, void *out, std::size_t width) {
        visit(type,
              [=](auto t) { gated_row<V>(gate, up, gate_scales, up_scales, scale, as<decltype(t)>(out), width); });
    };
    k.widen = [](Type type, const void *x, float *out, std::size_t width) {
        visit(type, [=](auto t) { widen_row<V>(as<decltype(t)>(x), out, width); });
    };
    k.quantise = [](Type type, const void *x, float *wide, std::int8_t *out, std::int32_t *sums, std::size_t width,
                    std::size_t segment, float least) {
        visit(type, [=](auto t) { widen_row<V>(as<decltype(t)>(x), wide, width); });
        return quantise_row(wide, out, sums, width, segment, least);
    };
    k.combine = [](Type type, const void *const *rows, const float *weights, std::size_t count, void *out,
                   std::size_t width) {
        visit(type, [=](auto t) {
            using T = decltype(t);
            combine_row<V, T>(reinterpret_cast<const T *const *>(rows), weights, count, as<T>(out), width);
        });
    };
    k.add = [](Type type, const void *a, const void *b, void *out, std::size_t width) {
        visit(type, [=](auto t) {
            using T = decltype(t);
            add_row<V, T>(as<T>(a), as<T>(b), as<T>(out), width);
        });
    };
    k.softmax = &softmax_row<V>;
    k.sigmoid = &sigmoid_row<V>;
    k.greedy = &greedy_row<V>;
    k.shares = [](Type type, float *scores, std::size_t stride, std::size_t low, std::size_t high, std::size_t depth,
                  float scale, void *out, float *largest, float *sum) {
        visit(type, [=](auto t) {
            shares_row<V>(scores, stride, low, high, depth, scale, as<decltype(t)>(out), largest, sum);
        });
    };
    k.merge = &merge_row<V>;
    k.divide = [](Type type, const float *mixed, float sum, void *out, std::size_t width) {
        visit(type, [=](auto t) { divide_row<V>(mixed, sum, as<decltype(t)>(out), width); });
    };
    return k;
}

}  // namespace
}  // namespace adapt

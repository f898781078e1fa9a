// The elementwise part of stochastic attention on a CPU, in float32: noise, perturbed weights and row sums of one block.
//
// Plain loops that the compiler vectorises. They work on short tiles and keep one function a loop: a chain of hash, two
// logarithms and two exponentials in one loop is longer than the window of instructions a core looks ahead, so that
// it waits for results; split, it does not. Exponentials and logarithms are in base 2, where
// they need no factor of their own.
//
// The polynomials are minimax fits (Remez); tests/engine/test_native.py measures their errors over all arguments.

#include <cstdint>
#include <cstring>
#include <cmath>

#define INLINE static inline __attribute__((always_inline))

namespace {

constexpr int TILE = 256;
constexpr float LOG2_E = 1.44269504088896341f;
constexpr float LN_2 = 0.693147180559945309f;
constexpr float LOG2_LN_2 = -0.528766372944898f;  // log2(ln 2)

enum Family { SOFTMAX = 0, WEIBULL = 1, LOGNORMAL = 2 };

INLINE int32_t bits_of(float x) {
    int32_t b;
    memcpy(&b, &x, 4);
    return b;
}

INLINE float float_of(int32_t b) {
    float x;
    memcpy(&x, &b, 4);
    return x;
}

// The noise of noise.py: bits, and the uniform number (n + 1/2) 2^-23 from their upper 23.
INLINE float uniform(uint32_t key, uint32_t first, uint32_t second) {
    uint32_t x = key ^ first;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15) ^ second) * 0x846CA68Bu;
    x = x ^ (x >> 16);
    return ((float)(int32_t)(x >> 9) + 0.5f) * 1.1920928955078125e-7f;
}

// 2^t for t <= 127, relative error below 2e-7; 0 below 2^-126; NaN stays.
INLINE float exp2_small(float t) {
    const float clamped = t < -126.0f ? -126.0f : t;
    const float shifted = clamped + 12582912.0f;  // rounds to an integer, which stands in the low bits
    const float x = clamped - (shifted - 12582912.0f);
    const float x2 = x * x;
    const float low = 0.693146978f + x * 0.240222421f;
    const float high = 0.0555073374f + x * 0.00967151264f;
    const float y = 1.0f + x * (low + x2 * (high + x2 * 0.00132647272f));
    const float power = float_of((bits_of(shifted) - 0x4B400000 + 127) << 23);
    return t < -126.0f ? 0.0f : y * power;
}

// -log2(u) for u in (0, 1), with a small relative error also where u is close to 1.
INLINE float minus_log2(float u) {
    const int32_t b = bits_of(u);
    const float exponent = (float)(126 - (b >> 23));
    const float x = 1.0f - float_of((b & 0x7FFFFF) | 0x3F000000);
    const float x2 = x * x;
    const float p0 = 1.44269483f + x * 0.721400241f;
    const float p1 = 0.478776557f + x * 0.392774495f;
    const float p2 = 0.0548484964f + x * 1.13313739f;
    const float p3 = -1.5603326f + x * 1.70949475f;
    return exponent + x * ((p0 + x2 * p1) + (x2 * x2) * (p2 + x2 * p3));
}

// log2(v) for normal v > 0, with a small absolute error.
INLINE float log2_normal(float v) {
    const int32_t b = bits_of(v);
    const float exponent = (float)((b >> 23) - 127);
    const float x = float_of((b & 0x7FFFFF) | 0x3F800000) - 1.0f;
    const float x2 = x * x;
    const float p0 = 1.44268988f - x * 0.721165806f;
    const float p1 = 0.4786837f - x * 0.347301089f;
    const float p2 = 0.241864783f - x * 0.137521354f;
    const float p3 = 0.0520590025f - x * 0.00930916376f;
    return exponent + x * ((p0 + x2 * p1) + (x2 * x2) * (p2 + x2 * p3));
}

// The normal quantile of u over sqrt(2), erfinv(2u - 1), in its two ranges. M. Giles, "Approximating the erfinv
// function", GPU Computing Gems 2011, table 5; w = -ln(4u(1 - u)).
INLINE float erfinv_central(float w) {
    w -= 2.5f;
    float p = 2.81022636e-08f;
    p = 3.43273939e-07f + p * w;
    p = -3.5233877e-06f + p * w;
    p = -4.39150654e-06f + p * w;
    p = 0.00021858087f + p * w;
    p = -0.00125372503f + p * w;
    p = -0.00417768164f + p * w;
    p = 0.246640727f + p * w;
    return 1.50140941f + p * w;
}

INLINE float erfinv_tail(float w) {
    w = sqrtf(w) - 3.0f;
    float p = -0.000200214257f;
    p = 0.000100950558f + p * w;
    p = 0.00134934322f + p * w;
    p = -0.00367342844f + p * w;
    p = 0.00573950773f + p * w;
    p = -0.0076224613f + p * w;
    p = 0.00943887047f + p * w;
    p = 1.00167406f + p * w;
    return 2.83297682f + p * w;
}

// Uniform numbers to the noise of a Weibull of shape 1, log(-log u), in base 2; in place.
INLINE void weibull_tile(float* x, int count) {
#pragma omp simd
    for (int j = 0; j < count; j++) x[j] = minus_log2(x[j]);
#pragma omp simd
    for (int j = 0; j < count; j++) x[j] = log2_normal(x[j]) + LOG2_LN_2;
}

// Uniform numbers to normal ones over sqrt(2); in place.
INLINE void normal_tile(float* x, int count) {
    float w[TILE], central[TILE];
#pragma omp simd
    for (int j = 0; j < count; j++) w[j] = -LN_2 * log2_normal(4.0f * x[j] * (1.0f - x[j]));
#pragma omp simd
    for (int j = 0; j < count; j++) central[j] = erfinv_central(w[j]);
#pragma omp simd
    for (int j = 0; j < count; j++) {
        const float quotient = w[j] < 5.0f ? central[j] : erfinv_tail(w[j]);
        x[j] = quotient * (2.0f * x[j] - 1.0f);
    }
}

// What one draw adds to the logits of a tile, in base 2: a function of the bits, times one of the spread.
template <int FAMILY>
INLINE void noise_tile(const uint32_t* keys, uint32_t first, uint32_t second, float spread, float* out, int count) {
#pragma omp simd
    for (int j = 0; j < count; j++) out[j] = uniform(keys[j], first, second);
    if (FAMILY == WEIBULL) weibull_tile(out, count);
    else normal_tile(out, count);
    const float factor = FAMILY == WEIBULL ? 1.0f / spread : spread * (float)(1.41421356237309505 * 1.44269504088896341);
#pragma omp simd
    for (int j = 0; j < count; j++) out[j] *= factor;
}

}  // namespace

// A block of rows: `chunks` pairs of batch row and key head, `groups` query heads of each, `queries` positions of each.
// A row's place in the whole problem addresses what is kept a row (words, sums) and the mask. Strides of the mask are
// in elements, 0 where it broadcasts.
struct Block {
    int64_t chunk, chunks, group, groups, query, queries, keys;  // where the block begins, and its size
    int64_t kv_heads, all_groups, all_queries;                   // sizes of the whole problem
    int64_t causal, offset;                                      // key j is seen by query i if j <= i + offset
    int64_t family;
    float scale;                // of the dot products
    const uint32_t* key_words;  // (keys)
    const uint32_t* first;      // a row each, of the draw at hand
    const uint32_t* second;
    const float* spread;  // a query head each
    const uint8_t* bool_mask;
    const float* float_mask;
    int64_t mask_strides[5];  // batch, kv head, group, query, key
    float masked_below;
};

// Natural logarithms, a row each: the largest logit; the sum of the clean weights over its exponential; that of a draw's.
struct Sums {
    float *peak, *clean, *drawn;
};

namespace {

struct Row {
    int64_t place, head, visible;
    const uint8_t* bool_mask;
    const float* float_mask;
};

INLINE Row locate(const Block& b, int64_t row) {
    const int64_t query = b.query + row % b.queries;
    const int64_t group = b.group + row / b.queries % b.groups;
    const int64_t chunk = b.chunk + row / (b.queries * b.groups);
    const int64_t head = chunk % b.kv_heads;
    const int64_t* s = b.mask_strides;
    const int64_t at = chunk / b.kv_heads * s[0] + head * s[1] + group * s[2] + query * s[3];
    int64_t visible = b.keys;
    if (b.causal) {
        const int64_t limit = query + b.offset + 1;
        visible = limit < 0 ? 0 : (limit < b.keys ? limit : b.keys);
    }
    return {(chunk * b.all_groups + group) * b.all_queries + query, head * b.all_groups + group, visible,
            b.bool_mask ? b.bool_mask + at : nullptr, b.float_mask ? b.float_mask + at : nullptr};
}

// Dot products become logits, -inf where masked; returns the largest, or 0 for a row without a key.
INLINE float finish_logits(const Block& b, const Row& row, float* logits) {
    const float scale = b.scale;
    const int64_t n = row.visible, stride = b.mask_strides[4];
    float m = -INFINITY;
    if (row.bool_mask) {
        const uint8_t* mask = row.bool_mask;
        if (stride == 1) {
#pragma omp simd reduction(max : m)
            for (int64_t j = 0; j < n; j++) {
                const float x = mask[j] ? logits[j] * scale : -INFINITY;
                logits[j] = x;
                m = x > m ? x : m;
            }
        } else {
            for (int64_t j = 0; j < n; j++) {
                const float x = mask[j * stride] ? logits[j] * scale : -INFINITY;
                logits[j] = x;
                m = x > m ? x : m;
            }
        }
    } else if (row.float_mask) {
        const float* mask = row.float_mask;
        const float below = b.masked_below;
        if (stride == 1) {
#pragma omp simd reduction(max : m)
            for (int64_t j = 0; j < n; j++) {
                const float x = mask[j] <= below ? -INFINITY : logits[j] * scale + mask[j];
                logits[j] = x;
                m = x > m ? x : m;
            }
        } else {
            for (int64_t j = 0; j < n; j++) {
                const float bias = mask[j * stride];
                const float x = bias <= below ? -INFINITY : logits[j] * scale + bias;
                logits[j] = x;
                m = x > m ? x : m;
            }
        }
    } else {
#pragma omp simd reduction(max : m)
        for (int64_t j = 0; j < n; j++) {
            const float x = logits[j] * scale;
            logits[j] = x;
            m = x > m ? x : m;
        }
    }
    for (int64_t j = n; j < b.keys; j++) logits[j] = -INFINITY;
    return m == -INFINITY ? 0.0f : m;
}

INLINE float maximum(const float* x, int64_t n) {
    float m = -INFINITY;
#pragma omp simd reduction(max : m)
    for (int64_t j = 0; j < n; j++) m = x[j] > m ? x[j] : m;
    return m == -INFINITY ? 0.0f : m;  // a row without a key: exp2(-inf - 0) = 0
}

// The natural logarithm of 2^peak times a sum of powers; NaN stays.
INLINE float log_total(float peak, float sum) {
    return sum > 0.0f || sum != sum ? (peak + log2f(sum)) * LN_2 : -INFINITY;
}

// All logits are taken less the largest of their row before anything is added: differences of large logits are exact,
// their sums with noise are not.
template <int FAMILY>
void forward_row(const Block& b, const Row& row, float* logits, float* weights, bool first_draw, const Sums& sums,
                 float* inverse_sum) {
    const int64_t n = row.visible, place = row.place;
    if (first_draw) {
        const float peak = finish_logits(b, row, logits);
        float sum = 0.0f;
        if (FAMILY == SOFTMAX) {
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < n; j++) {
                const float e = exp2_small((logits[j] - peak) * LOG2_E);
                weights[j] = e;
                sum += e;
            }
            *inverse_sum = sum == 0.0f ? 0.0f : 1.0f / sum;
        } else {
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < n; j++) {
                const float x = (logits[j] - peak) * LOG2_E;
                logits[j] = x;
                sum += exp2_small(x);
            }
        }
        sums.peak[place] = peak;
        sums.clean[place] = log_total(0.0f, sum);
        if (FAMILY == SOFTMAX) sums.drawn[place] = sums.clean[place];
    }
    if (FAMILY != SOFTMAX) {
        const uint32_t first = b.first[place], second = b.second[place];
        const float spread = b.spread[row.head];
        float noise[TILE];
        for (int64_t start = 0; start < n; start += TILE) {
            const int count = n - start < TILE ? (int)(n - start) : TILE;
            noise_tile<FAMILY>(b.key_words + start, first, second, spread, noise, count);
#pragma omp simd
            for (int j = 0; j < count; j++) weights[start + j] = logits[start + j] + noise[j];
        }
        // The noise of a small shape reaches far below the clean maximum: the draw has a maximum of its own.
        const float peak = maximum(weights, n);
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < n; j++) {
            const float e = exp2_small(weights[j] - peak);
            weights[j] = e;
            sum += e;
        }
        sums.drawn[place] = log_total(peak, sum);
        *inverse_sum = sum == 0.0f ? 0.0f : 1.0f / sum;
    }
    for (int64_t j = n; j < b.keys; j++) weights[j] = 0.0f;
}

// A sum of a row that sees no key is -inf; any finite number does, as its logits are -inf.
INLINE float finite(float x) { return x == -INFINITY ? 0.0f : x; }

template <int FAMILY>
void backward_row(const Block& b, const Row& row, float* logits, const float* grad_weights, float* weights,
                  float* grad_logits, bool first_draw, const Sums& sums, const float* dot, const float* grad_lse,
                  float* grad_spread) {
    const int64_t n = row.visible, place = row.place;
    const float peak = sums.peak[place];
    if (first_draw) {
        finish_logits(b, row, logits);
#pragma omp simd
        for (int64_t j = 0; j < n; j++) logits[j] = (logits[j] - peak) * LOG2_E;
    }
    const float d = dot[place], g = grad_lse && first_draw ? grad_lse[place] : 0.0f;
    const float clean = finite(sums.clean[place]) * LOG2_E, drawn = finite(sums.drawn[place]) * LOG2_E;
    uint32_t first = 0, second = 0;
    float spread = 1.0f, along_noise = 0.0f;
    if (FAMILY != SOFTMAX) {
        first = b.first[place];
        second = b.second[place];
        spread = b.spread[row.head];
    }
    float noise[TILE], sampled[TILE];
    for (int64_t start = 0; start < n; start += TILE) {
        const int count = n - start < TILE ? (int)(n - start) : TILE;
        const float* phi = logits + start;
        const float* grad_in = grad_weights + start;
        float* w = weights + start;
        float* out = grad_logits + start;
        if (FAMILY == SOFTMAX) {
#pragma omp simd
            for (int j = 0; j < count; j++) sampled[j] = exp2_small(phi[j] - drawn);
        } else {
            noise_tile<FAMILY>(b.key_words + start, first, second, spread, noise, count);
#pragma omp simd
            for (int j = 0; j < count; j++) sampled[j] = exp2_small(phi[j] + noise[j] - drawn);
        }
        if (first_draw) {
            // `weights` may be `logits` and `grad_logits` may be `grad_weights`: each entry is read before it is written.
            if (g != 0.0f) {
#pragma omp simd
                for (int j = 0; j < count; j++) {
                    const float change = sampled[j] * (grad_in[j] - d);
                    out[j] = change + g * exp2_small(phi[j] - clean);
                    w[j] = sampled[j];
                    sampled[j] = change;
                }
            } else {
#pragma omp simd
                for (int j = 0; j < count; j++) {
                    const float change = sampled[j] * (grad_in[j] - d);
                    out[j] = change;
                    w[j] = sampled[j];
                    sampled[j] = change;
                }
            }
        } else {
#pragma omp simd
            for (int j = 0; j < count; j++) {
                const float change = sampled[j] * (grad_in[j] - d);
                out[j] += change;
                w[j] = sampled[j];
                sampled[j] = change;
            }
        }
        if (FAMILY != SOFTMAX && grad_spread) {
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int j = 0; j < count; j++) sum += sampled[j] * noise[j];
            along_noise += sum;
        }
    }
    for (int64_t j = n; j < b.keys; j++) weights[j] = 0.0f;
    if (first_draw)
        for (int64_t j = n; j < b.keys; j++) grad_logits[j] = 0.0f;
    if (FAMILY != SOFTMAX && grad_spread)
        grad_spread[place] = along_noise * LN_2 * (FAMILY == WEIBULL ? -1.0f / spread : 1.0f / spread);
}

}  // namespace

extern "C" {

// Unnormalised weights of a block, rows x keys, from dot products, which the first draw turns into logits in place, in
// base 2 and less the largest of their row. sums: a row of the problem each; inverse_sums: a row of the block each.
// `weights` may be `logits` where there is one draw.
void attention_forward(const Block* block, float* logits, float* weights, int first_draw, const Sums* sums,
                       float* inverse_sums, int threads) {
    const Block& b = *block;
    const int64_t rows = b.chunks * b.groups * b.queries;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        const Row row = locate(b, r);
        float *x = logits + r * b.keys, *w = weights + r * b.keys;
        if (b.family == SOFTMAX) forward_row<SOFTMAX>(b, row, x, w, first_draw, *sums, inverse_sums + r);
        if (b.family == WEIBULL) forward_row<WEIBULL>(b, row, x, w, first_draw, *sums, inverse_sums + r);
        if (b.family == LOGNORMAL) forward_row<LOGNORMAL>(b, row, x, w, first_draw, *sums, inverse_sums + r);
    }
}

// Normalised weights and the gradient of the logits. dot: sum of output and its gradient, a row of the problem each;
// grad_lse and grad_spread (a row each) may be null. The first draw writes grad_logits, the others add to it.
void attention_backward(const Block* block, float* logits, const float* grad_weights, float* weights,
                        float* grad_logits, int first_draw, const Sums* sums, const float* dot, const float* grad_lse,
                        float* grad_spread, int threads) {
    const Block& b = *block;
    const int64_t rows = b.chunks * b.groups * b.queries;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        const Row row = locate(b, r);
        const int64_t at = r * b.keys;
        float *x = logits + at, *w = weights + at, *out = grad_logits + at;
        const float* in = grad_weights + at;
        if (b.family == SOFTMAX)
            backward_row<SOFTMAX>(b, row, x, in, w, out, first_draw, *sums, dot, grad_lse, grad_spread);
        if (b.family == WEIBULL)
            backward_row<WEIBULL>(b, row, x, in, w, out, first_draw, *sums, dot, grad_lse, grad_spread);
        if (b.family == LOGNORMAL)
            backward_row<LOGNORMAL>(b, row, x, in, w, out, first_draw, *sums, dot, grad_lse, grad_spread);
    }
}

// The functions of one number, for tests: 0 exp2, 1 -log2, 2 log2, 3 log2(-log u), 4 the normal quantile over sqrt(2).
void evaluate(int function, const float* x, float* out, int64_t n) {
    for (int64_t start = 0; start < n; start += TILE) {
        const int count = n - start < TILE ? (int)(n - start) : TILE;
        float* y = out + start;
        for (int j = 0; j < count; j++) {
            y[j] = x[start + j];
            if (function == 0) y[j] = exp2_small(y[j]);
            if (function == 1) y[j] = minus_log2(y[j]);
            if (function == 2) y[j] = log2_normal(y[j]);
        }
        if (function == 3) weibull_tile(y, count);
        if (function == 4) normal_tile(y, count);
    }
}

}  // extern "C"

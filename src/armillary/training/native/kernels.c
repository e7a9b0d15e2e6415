/* What a decoder layer does between its matrix products, for processors with AVX-512 BF16.

   layer.py says what each function is for and holds it against plain torch. Numbers are bfloat16
   (bf16, kept as their bits) or float; all arithmetic is in float32, and products of bf16 pairs are
   summed in float32 by the processor's own instruction. Matrices are row-major. Sizes are in
   elements. Compiled with -fopenmp, so that work is shared among the threads that torch set.

   In products the right operand is "interleaved": a 32-bit word holds rows 2k and 2k + 1 of one
   column, which is what the instruction multiplies with a pair of the left operand's row. */

#ifndef __AVX512BF16__
#error "the processor has no AVX-512 BF16"
#endif

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;
typedef uint32_t pair;

enum { BLOCK = 64, LANES = 16 };

static inline __m512 load(const bf16 *at) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

static inline void store(bf16 *at, __m512 x) { _mm256_storeu_si256((__m256i *)at, narrow(x)); }

/* 2^x; 0 below the least float, NaN for NaN. */
static inline __m512 exp2_of(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.5403530e-4f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.3333558e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}

static inline __m512 sigmoid(__m512 x) {
    __m512 e = exp2_of(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)));
    return _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

/* RMSNorm of a residual sum. u = x + y (y may be absent; u may be x), scaled = u·rstd, out =
   scaled·weight. Shapes: x, u float (n, d); y, scaled, out bf16 (n, d); rstd (n). */
void add_and_norm(const float *x, const bf16 *y, const float *weight, float eps, float *u,
                  bf16 *scaled, bf16 *out, float *rstd, int64_t n, int64_t d) {
#pragma omp parallel for
    for (int64_t row = 0; row < n; row++) {
        const float *from = x + row * d;
        float *to = u + row * d;
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < d; i += LANES) {
            __m512 value = _mm512_loadu_ps(from + i);
            if (y) {
                value = _mm512_add_ps(value, load(y + row * d + i));
                _mm512_storeu_ps(to + i, value);
            }
            squares = _mm512_fmadd_ps(value, value, squares);
        }
        float r = 1.0f / sqrtf(_mm512_reduce_add_ps(squares) / d + eps);
        rstd[row] = r;
        const float *sum = y ? to : from;
        for (int64_t i = 0; i < d; i += LANES) {
            __m512 value = _mm512_mul_ps(_mm512_loadu_ps(sum + i), _mm512_set1_ps(r));
            store(scaled + row * d + i, value);
            store(out + row * d + i, _mm512_mul_ps(value, _mm512_loadu_ps(weight + i)));
        }
    }
}

/* out = scaled·weight again, for the backward pass. */
void rescale(const bf16 *scaled, const float *weight, bf16 *out, int64_t n, int64_t d) {
#pragma omp parallel for
    for (int64_t row = 0; row < n; row++)
        for (int64_t i = 0; i < d; i += LANES)
            store(out + row * d + i,
                  _mm512_mul_ps(load(scaled + row * d + i), _mm512_loadu_ps(weight + i)));
}

/* Its gradient: of_u = past (or 0) + rstd·(w·g − scaled·mean(w·g·scaled)), of_weight = Σ rows g·scaled.
   Shapes: g (of out) and scaled bf16 (n, d); past, which went around the norm, and of_u (perhaps
   the same memory) float (n, d); of_weight (d), zeros at first. */
void norm_backward(const bf16 *g, const bf16 *scaled, const float *rstd, const float *weight,
                   const float *past, float *of_u, float *of_weight, int64_t n, int64_t d) {
    int threads = omp_get_max_threads();
    float *sums = calloc(threads * d, sizeof(float));
#pragma omp parallel
    {
        float *own = sums + omp_get_thread_num() * d;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < n; row++) {
            const bf16 *gr = g + row * d, *sr = scaled + row * d;
            __m512 dots = _mm512_setzero_ps();
            for (int64_t i = 0; i < d; i += LANES) {
                __m512 gs = _mm512_mul_ps(load(gr + i), load(sr + i));
                dots = _mm512_fmadd_ps(gs, _mm512_loadu_ps(weight + i), dots);
                _mm512_storeu_ps(own + i, _mm512_add_ps(_mm512_loadu_ps(own + i), gs));
            }
            __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(dots) / d);
            __m512 r = _mm512_set1_ps(rstd[row]);
            for (int64_t i = 0; i < d; i += LANES) {
                __m512 wg = _mm512_mul_ps(load(gr + i), _mm512_loadu_ps(weight + i));
                __m512 inner = _mm512_fnmadd_ps(load(sr + i), mean, wg);
                __m512 around =
                    past ? _mm512_loadu_ps(past + row * d + i) : _mm512_setzero_ps();
                _mm512_storeu_ps(of_u + row * d + i, _mm512_fmadd_ps(r, inner, around));
            }
        }
    }
    /* In the threads' order, so that a step is the same bits each time. */
    for (int thread = 0; thread < threads; thread++)
        for (int64_t i = 0; i < d; i++) of_weight[i] += sums[thread * d + i];
    free(sums);
}

/* out = silu(gate)·up. Shapes: gate_up (n, 2f), the gate first; out (n, f). */
void swiglu(const bf16 *gate_up, bf16 *out, int64_t n, int64_t f) {
#pragma omp parallel for
    for (int64_t row = 0; row < n; row++)
        for (int64_t i = 0; i < f; i += LANES) {
            const bf16 *at = gate_up + row * 2 * f + i;
            __m512 gate = load(at);
            __m512 silu = _mm512_mul_ps(gate, sigmoid(gate));
            store(out + row * f + i, _mm512_mul_ps(silu, load(at + f)));
        }
}

/* Its gradient in the place of gate_up, and in the place of the gradient of out, out itself. */
void swiglu_backward(bf16 *gate_up, bf16 *out, int64_t n, int64_t f) {
    __m512 one = _mm512_set1_ps(1.0f);
#pragma omp parallel for
    for (int64_t row = 0; row < n; row++)
        for (int64_t i = 0; i < f; i += LANES) {
            bf16 *at = gate_up + row * 2 * f + i;
            __m512 gate = load(at), up = load(at + f), g = load(out + row * f + i);
            __m512 s = sigmoid(gate), silu = _mm512_mul_ps(gate, s);
            /* silu' = s·(1 + gate·(1 − s)) = s + silu·(1 − s) */
            __m512 slope = _mm512_fmadd_ps(silu, _mm512_sub_ps(one, s), s);
            store(at, _mm512_mul_ps(_mm512_mul_ps(g, up), slope));
            store(at + f, _mm512_mul_ps(g, silu));
            store(out + row * f + i, _mm512_mul_ps(silu, up));
        }
}

static inline __m512 load_some(const bf16 *at, __mmask16 some) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

/* Cross-entropy of each row, its log Σ exp, and, when wanted, in the place of the logits their
   gradient: p·(1 + 2·z_loss·log Σ exp) − one-hot. Shapes: logits (n, size), others (n). */
void cross_entropy(bf16 *logits, const int64_t *labels, float z_loss, int64_t wanted, float *losses,
                   float *log_sums, int64_t n, int64_t size) {
    const float log2_e = 1.44269504f;
#pragma omp parallel for
    for (int64_t row = 0; row < n; row++) {
        bf16 *x = logits + row * size;
        __mmask16 all = 0xffff, some = size % LANES ? (1 << size % LANES) - 1 : all;
        __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
        for (int64_t i = 0; i < size; i += LANES) {
            __mmask16 mask = i + LANES <= size ? all : some;
            most = _mm512_mask_max_ps(most, mask, most, load_some(x + i, mask));
        }
        float top = _mm512_reduce_max_ps(most);
        __m512 shift = _mm512_set1_ps(-top * log2_e), factor = _mm512_set1_ps(log2_e);
        for (int64_t i = 0; i < size; i += LANES) {
            __mmask16 mask = i + LANES <= size ? all : some;
            __m512 e = exp2_of(_mm512_fmadd_ps(load_some(x + i, mask), factor, shift));
            sum = _mm512_mask_add_ps(sum, mask, sum, e);
        }
        float log_sum = top + logf(_mm512_reduce_add_ps(sum));
        pair word = (pair)x[labels[row]] << 16;
        float of_label;
        memcpy(&of_label, &word, sizeof of_label);
        losses[row] = log_sum - of_label;
        log_sums[row] = log_sum;
        if (!wanted) continue;
        float slope = 1.0f + 2.0f * z_loss * log_sum;
        shift = _mm512_set1_ps(-log_sum * log2_e);
        for (int64_t i = 0; i < size; i += LANES) {
            __mmask16 mask = i + LANES <= size ? all : some;
            __m512 p = exp2_of(_mm512_fmadd_ps(load_some(x + i, mask), factor, shift));
            p = _mm512_mul_ps(p, _mm512_set1_ps(slope));
            if (i <= labels[row] && labels[row] < i + LANES)
                p = _mm512_mask_sub_ps(p, 1 << (labels[row] - i), p, _mm512_set1_ps(1.0f));
            _mm256_mask_storeu_epi16(x + i, mask, narrow(p));
        }
    }
}

/* Turn `heads` vectors of each row, in place; `sign` −1 turns back. Halves are paired.
   Shapes: x (batch·length, stride), from column 0 heads of `width`; cos, sin float
   (rows, length, width / 2), where `rows` is 1 or batch. */
void turn(bf16 *x, const float *cos, const float *sin, float sign, int64_t batch, int64_t length,
          int64_t rows, int64_t heads, int64_t width, int64_t stride) {
    int64_t half = width / 2;
#pragma omp parallel for
    for (int64_t row = 0; row < batch * length; row++) {
        int64_t angle = (rows == 1 ? row % length : row) * half;
        for (int64_t head = 0; head < heads; head++)
            for (int64_t i = 0; i < half; i += LANES) {
                bf16 *at = x + row * stride + head * width + i;
                __m512 a = load(at), b = load(at + half);
                __m512 c = _mm512_loadu_ps(cos + angle + i);
                __m512 s = _mm512_mul_ps(_mm512_loadu_ps(sin + angle + i), _mm512_set1_ps(sign));
                store(at, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
                store(at + half, _mm512_fmadd_ps(a, s, _mm512_mul_ps(b, c)));
            }
    }
}

/* C (m, n) = or += A (m, 2·pairs) · B (pairs, n). m is a multiple of 8, n of 32. */
static inline void product(int64_t m, int64_t n, int64_t pairs, const bf16 *a, int64_t a_stride,
                           const pair *b, int64_t b_stride, float *c, int64_t c_stride, int add) {
    for (int64_t column = 0; column < n; column += 2 * LANES)
        for (int64_t row = 0; row < m; row += 8) {
            float *to = c + row * c_stride + column;
            __m512 left[8], right[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                left[i] = add ? _mm512_loadu_ps(to + i * c_stride) : _mm512_setzero_ps();
                right[i] = add ? _mm512_loadu_ps(to + i * c_stride + LANES) : _mm512_setzero_ps();
            }
            const bf16 *from = a + row * a_stride;
            for (int64_t k = 0; k < pairs; k++) {
                __m512bh b0 = (__m512bh)_mm512_loadu_si512(b + k * b_stride + column);
                __m512bh b1 = (__m512bh)_mm512_loadu_si512(b + k * b_stride + column + LANES);
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) {
                    int32_t both;
                    memcpy(&both, from + i * a_stride + 2 * k, sizeof both);
                    __m512bh all = (__m512bh)_mm512_set1_epi32(both);
                    left[i] = _mm512_dpbf16_ps(left[i], all, b0);
                    right[i] = _mm512_dpbf16_ps(right[i], all, b1);
                }
            }
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                _mm512_storeu_ps(to + i * c_stride, left[i]);
                _mm512_storeu_ps(to + i * c_stride + LANES, right[i]);
            }
        }
}

/* The right operand for products over a vector's channels: (width / 2, length) pairs. */
static void pair_channels(const bf16 *x, int64_t stride, int64_t length, int64_t width, pair *to) {
    for (int64_t t0 = 0; t0 < length; t0 += LANES)
        for (int64_t k = 0; k < width / 2; k++)
            for (int64_t t = t0; t < t0 + LANES; t++)
                memcpy(to + k * length + t, x + t * stride + 2 * k, sizeof(pair));
}

/* The right operand for products over tokens: (length / 2, width) pairs. */
static void pair_tokens(const bf16 *x, int64_t stride, int64_t length, int64_t width, pair *to) {
    for (int64_t t = 0; t < length; t += 2)
        for (int64_t i = 0; i < width; i++)
            to[t / 2 * width + i] = x[t * stride + i] | (pair)x[(t + 1) * stride + i] << 16;
}

/* Who reads whom in one row: a query reads keys of its own document and no later ones, in a window.
   `first` is each block's first key that one of its queries reads; `same` whether a block lies in
   one document. */
typedef struct {
    const int64_t *documents;
    int64_t window;
    int64_t *first;
    char *same;
} Rule;

static Rule rule_of(const int64_t *documents, int64_t window, int64_t length) {
    int64_t blocks = length / BLOCK;
    Rule rule = {documents, window, malloc(blocks * sizeof(int64_t)), malloc(blocks)};
    for (int64_t block = 0; block < blocks; block++) {
        int64_t start = block * BLOCK, first = documents ? start : 0;
        rule.same[block] = 1;
        for (int64_t t = start; documents && t < start + BLOCK; t++) {
            if (documents[t] != documents[start]) rule.same[block] = 0;
            if (t > start && documents[t] == documents[t - 1]) continue;
            int64_t s = 0;
            while (documents[s] != documents[t]) s++;
            if (s < first) first = s;
        }
        if (first < start - window + 1) first = start - window + 1;
        rule.first[block] = first / BLOCK * BLOCK;
    }
    return rule;
}

static void free_rule(Rule rule) {
    free(rule.first);
    free(rule.same);
}

static int needs_mask(const Rule *rule, int64_t query, int64_t key) {
    if (query == key || key <= query + BLOCK - 1 - rule->window) return 1;
    if (!rule->documents) return 0;
    return !rule->same[query / BLOCK] || !rule->same[key / BLOCK] ||
           rule->documents[query] != rule->documents[key];
}

static inline int reads(const Rule *rule, int64_t query, int64_t key) {
    return key <= query && key > query - rule->window &&
           (!rule->documents || rule->documents[query] == rule->documents[key]);
}

/* Attention of each head. qkv bf16 (batch·length, (heads + 2·kv_heads)·width), queries first, then
   keys, then values; out bf16 (batch·length, heads·width); log_sum float (batch, heads, length) is
   log2 Σ 2^(scores·log2 e). documents (batch, length) may be absent. length is a multiple of 64,
   width of 32. The softmax is made block by block (Milakov and Gimelshein 2018; Dao et al. 2022). */
void attention(const bf16 *qkv, const int64_t *documents, int64_t window, float scale, bf16 *out,
               float *log_sum, int64_t batch, int64_t length, int64_t heads, int64_t kv_heads,
               int64_t width) {
    int64_t stride = (heads + 2 * kv_heads) * width, group = heads / kv_heads;
    __m512 factor = _mm512_set1_ps(scale * 1.44269504f);
#pragma omp parallel for schedule(dynamic)
    for (int64_t task = 0; task < batch * kv_heads; task++) {
        int64_t row = task / kv_heads, kv = task % kv_heads;
        const bf16 *q = qkv + row * length * stride, *k = q + (heads + kv) * width;
        const bf16 *v = k + kv_heads * width;
        Rule rule = rule_of(documents ? documents + row * length : 0, window, length);
        pair *keys = malloc(length * width * sizeof(bf16));
        pair *values = malloc(length * width * sizeof(bf16));
        float *sums = malloc(BLOCK * width * sizeof(float));
        float scores[BLOCK * BLOCK], top[BLOCK], total[BLOCK];
        bf16 weights[BLOCK * BLOCK];
        pair_channels(k, stride, length, width, keys);
        pair_tokens(v, stride, length, width, values);
        for (int64_t head = kv * group; head < (kv + 1) * group; head++)
            for (int64_t i0 = 0; i0 < length; i0 += BLOCK) {
                memset(sums, 0, BLOCK * width * sizeof(float));
                for (int i = 0; i < BLOCK; i++) top[i] = -1e30f, total[i] = 0;
                for (int64_t j0 = rule.first[i0 / BLOCK]; j0 <= i0; j0 += BLOCK) {
                    product(BLOCK, BLOCK, width / 2, q + i0 * stride + head * width, stride,
                            keys + j0, length, scores, BLOCK, 0);
                    if (needs_mask(&rule, i0, j0))
                        for (int i = 0; i < BLOCK; i++)
                            for (int j = 0; j < BLOCK; j++)
                                if (!reads(&rule, i0 + i, j0 + j))
                                    scores[i * BLOCK + j] = -INFINITY;
                    for (int i = 0; i < BLOCK; i++) {
                        __m512 s[4], most = _mm512_set1_ps(top[i]), sum = _mm512_setzero_ps();
                        for (int j = 0; j < 4; j++) {
                            s[j] = _mm512_loadu_ps(scores + i * BLOCK + j * LANES);
                            s[j] = _mm512_mul_ps(s[j], factor);
                            most = _mm512_max_ps(most, s[j]);
                        }
                        float now = _mm512_reduce_max_ps(most), before = exp2f(top[i] - now);
                        for (int j = 0; j < 4; j++) {
                            s[j] = exp2_of(_mm512_sub_ps(s[j], _mm512_set1_ps(now)));
                            sum = _mm512_add_ps(sum, s[j]);
                            store(weights + i * BLOCK + j * LANES, s[j]);
                        }
                        total[i] = total[i] * before + _mm512_reduce_add_ps(sum);
                        if (now > top[i])
                            for (int64_t c = 0; c < width; c += LANES) {
                                float *at = sums + i * width + c;
                                __m512 old = _mm512_loadu_ps(at);
                                _mm512_storeu_ps(at, _mm512_mul_ps(old, _mm512_set1_ps(before)));
                            }
                        top[i] = now;
                    }
                    product(BLOCK, width, BLOCK / 2, weights, BLOCK, values + j0 / 2 * width, width,
                            sums, width, 1);
                }
                for (int i = 0; i < BLOCK; i++) {
                    int64_t t = row * length + i0 + i;
                    log_sum[(row * heads + head) * length + i0 + i] = top[i] + log2f(total[i]);
                    for (int64_t c = 0; c < width; c += LANES)
                        store(out + (t * heads + head) * width + c,
                              _mm512_mul_ps(_mm512_loadu_ps(sums + i * width + c),
                                            _mm512_set1_ps(1.0f / total[i])));
                }
            }
        free(keys), free(values), free(sums);
        free_rule(rule);
    }
}

/* Its gradient: of_out and out (batch·length, heads·width) → of_qkv, shaped as qkv. Scores are made
   again, transposed, so that their blocks are the left operands of what follows. */
void attention_backward(const bf16 *of_out, const bf16 *qkv, const bf16 *out, const float *log_sum,
                        const int64_t *documents, int64_t window, float scale, bf16 *of_qkv,
                        int64_t batch, int64_t length, int64_t heads, int64_t kv_heads,
                        int64_t width) {
    int64_t stride = (heads + 2 * kv_heads) * width, group = heads / kv_heads;
    int64_t size = length * width, out_stride = heads * width;
    __m512 factor = _mm512_set1_ps(scale * 1.44269504f), unit = _mm512_set1_ps(scale);
#pragma omp parallel for schedule(dynamic)
    for (int64_t task = 0; task < batch * kv_heads; task++) {
        int64_t row = task / kv_heads, kv = task % kv_heads;
        const bf16 *q_all = qkv + row * length * stride, *k = q_all + (heads + kv) * width;
        const bf16 *v = k + kv_heads * width;
        Rule rule = rule_of(documents ? documents + row * length : 0, window, length);
        bf16 *key_channels = malloc(size * sizeof(bf16)); /* (width, length) */
        pair *q_channels = malloc(size * sizeof(bf16)), *q_tokens = malloc(size * sizeof(bf16));
        pair *g_channels = malloc(size * sizeof(bf16)), *g_tokens = malloc(size * sizeof(bf16));
        float *of_q = malloc(size * sizeof(float)); /* (width, length) */
        float *of_k = calloc(size, sizeof(float)), *of_v = calloc(size, sizeof(float));
        float *delta = malloc(length * sizeof(float));
        float scores[BLOCK * BLOCK], of_weights[BLOCK * BLOCK];
        bf16 weights[BLOCK * BLOCK], of_scores[BLOCK * BLOCK];
        pair of_scores_pairs[BLOCK / 2 * BLOCK];
        for (int64_t t0 = 0; t0 < length; t0 += 32)
            for (int64_t c = 0; c < width; c++)
                for (int64_t t = t0; t < t0 + 32; t++)
                    key_channels[c * length + t] = k[t * stride + c];
        for (int64_t head = kv * group; head < (kv + 1) * group; head++) {
            const bf16 *q = q_all + head * width;
            const bf16 *g = of_out + row * length * out_stride + head * width;
            const bf16 *o = out + row * length * out_stride + head * width;
            const float *sums = log_sum + (row * heads + head) * length;
            pair_channels(q, stride, length, width, q_channels);
            pair_tokens(q, stride, length, width, q_tokens);
            pair_channels(g, out_stride, length, width, g_channels);
            pair_tokens(g, out_stride, length, width, g_tokens);
            memset(of_q, 0, size * sizeof(float));
            for (int64_t t = 0; t < length; t++) {
                __m512 dots = _mm512_setzero_ps();
                for (int64_t c = 0; c < width; c += LANES)
                    dots = _mm512_fmadd_ps(load(g + t * out_stride + c),
                                           load(o + t * out_stride + c), dots);
                delta[t] = _mm512_reduce_add_ps(dots);
            }
            for (int64_t i0 = 0; i0 < length; i0 += BLOCK)
                for (int64_t j0 = rule.first[i0 / BLOCK]; j0 <= i0; j0 += BLOCK) {
                    product(BLOCK, BLOCK, width / 2, k + j0 * stride, stride, q_channels + i0,
                            length, scores, BLOCK, 0);
                    product(BLOCK, BLOCK, width / 2, v + j0 * stride, stride, g_channels + i0,
                            length, of_weights, BLOCK, 0);
                    if (needs_mask(&rule, i0, j0))
                        for (int j = 0; j < BLOCK; j++)
                            for (int i = 0; i < BLOCK; i++)
                                if (!reads(&rule, i0 + i, j0 + j))
                                    scores[j * BLOCK + i] = -INFINITY;
                    for (int j = 0; j < BLOCK; j += 2)
                        for (int i = 0; i < BLOCK; i += LANES) {
                            __m512 sum = _mm512_loadu_ps(sums + i0 + i);
                            __m512 d = _mm512_loadu_ps(delta + i0 + i);
                            __m512i both[2];
                            for (int odd = 0; odd < 2; odd++) {
                                int at = (j + odd) * BLOCK + i;
                                __m512 s = _mm512_loadu_ps(scores + at);
                                __m512 p = exp2_of(_mm512_fmsub_ps(s, factor, sum));
                                __m512 of = _mm512_sub_ps(_mm512_loadu_ps(of_weights + at), d);
                                __m256i ds = narrow(_mm512_mul_ps(p, of));
                                store(weights + at, p);
                                _mm256_storeu_si256((__m256i *)(of_scores + at), ds);
                                both[odd] = _mm512_cvtepu16_epi32(ds);
                            }
                            __m512i words = _mm512_or_si512(both[0], _mm512_slli_epi32(both[1], 16));
                            _mm512_storeu_si512(of_scores_pairs + j / 2 * BLOCK + i, words);
                        }
                    product(BLOCK, width, BLOCK / 2, weights, BLOCK, g_tokens + i0 / 2 * width,
                            width, of_v + j0 * width, width, 1);
                    product(BLOCK, width, BLOCK / 2, of_scores, BLOCK, q_tokens + i0 / 2 * width,
                            width, of_k + j0 * width, width, 1);
                    product(width, BLOCK, BLOCK / 2, key_channels + j0, length, of_scores_pairs,
                            BLOCK, of_q + i0, length, 1);
                }
            bf16 *to = of_qkv + row * length * stride + head * width;
            for (int64_t t = 0; t < length; t++)
                for (int64_t c = 0; c < width; c += LANES) {
                    float channels[LANES];
                    for (int i = 0; i < LANES; i++) channels[i] = of_q[(c + i) * length + t];
                    store(to + t * stride + c, _mm512_mul_ps(_mm512_loadu_ps(channels), unit));
                }
        }
        bf16 *to = of_qkv + row * length * stride + (heads + kv) * width;
        for (int64_t t = 0; t < length; t++)
            for (int64_t c = 0; c < width; c += LANES) {
                store(to + t * stride + c,
                      _mm512_mul_ps(_mm512_loadu_ps(of_k + t * width + c), unit));
                store(to + t * stride + kv_heads * width + c, _mm512_loadu_ps(of_v + t * width + c));
            }
        free(key_channels), free(q_channels), free(q_tokens), free(g_channels), free(g_tokens);
        free(of_q), free(of_k), free(of_v), free(delta);
        free_rule(rule);
    }
}

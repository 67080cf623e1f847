/* One pass of Qwen3 and the draw of the next tokens, on one thread, for models that fit into a cache.
 *
 * The same arithmetic as engines/torch_forward.py in one call: a small model's pass is hundreds of microseconds, of which
 * an interpreter's dispatch of a hundred operations would be most. Plain C with GCC/Clang vector types: the compiler
 * lowers a vector of 16 floats to what the machine has.
 *
 *   T tokens of the pass; token t stands at positions[t] of the call in slot slots[t], and sees positions 0..positions[t] of it.
 *   Keys and values of all tokens are written before any token looks, so pieces of prompts need no mask.
 *   H hidden, D head_dim, I intermediate. All of H, D, I and the widths of matrices are multiples of 16.
 *   Matrices are packed: panels of up to 64 columns, each panel (inputs, columns) contiguous.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define PANEL 64
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct {
    const float *qkv, *qk_norm, *out, *gate_up, *down;
} Layer;

typedef struct {
    int32_t num_layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary, head_width;
    int32_t num_blocks, block_size;
    float eps;
    const float *embedding, *head, *rope;
    const Layer *layers;
    float *kv; /* (layers, blocks, 2, kv_heads, block_size, D) */
} Model;

INLINE vec load(const float *at) { return *(const vec *)at; }
INLINE void store(float *at, vec value) { *(vec *)at = value; }
INLINE vec splat(float value) { return value - (vec){0}; }

typedef float vec8 __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));

INLINE float sum(vec v) {
    vec8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    vec4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

INLINE vec larger(vec a, vec b) {
    ivec is_a = a > b;
    return (vec)(((ivec)a & is_a) | ((ivec)b & ~is_a));
}

INLINE float highest(const float *at, int length) {
    vec top = load(at);
    for (int i = LANES; i < length; i += LANES) top = larger(top, load(at + i));
    float value = top[0];
    for (int i = 1; i < LANES; i++) value = top[i] > value ? top[i] : value;
    return value;
}

/* e^x to about 1e-7 relative; x <= 88, anything under -87 gives about 0. Cephes' polynomial. */
INLINE vec exp16(vec x) {
    x = larger(x, splat(-87.0f));
    vec scaled = x * 1.44269504088896341f;
    vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    vec whole = (scaled + magic) - magic;
    vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec exponent = (__builtin_convertvector(whole, ivec) + 127) << 23;
    return p * (vec)exponent;
}

/* out (T, width): x / sqrt(mean(x^2) + eps), the weight is folded into the matrix that follows. */
static void rms_norm(const float *x, float *out, int num_tokens, int width, float eps) {
    for (int t = 0; t < num_tokens; t++, x += width, out += width) {
        vec squares = {0};
        for (int i = 0; i < width; i += LANES) squares += load(x + i) * load(x + i);
        float scale = 1.0f / sqrtf(sum(squares) / width + eps);
        for (int i = 0; i < width; i += LANES) store(out + i, load(x + i) * scale);
    }
}

/* `rows` x `vectors` vectors of one panel, in registers. */
INLINE void tile(int rows, int vectors, const float *a, int inner, const float *panel, float *out, int width, int add) {
    vec acc[6][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) acc[r][v] = add ? load(out + r * width + v * LANES) : (vec){0};
    for (int k = 0; k < inner; k++, panel += vectors * LANES)
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) acc[r][v] += a[r * inner + k] * load(panel + v * LANES);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(out + r * width + v * LANES, acc[r][v]);
}

INLINE void panel_times(int vectors, const float *a, int num_tokens, int inner, const float *panel, float *out, int width, int add) {
    int t = 0;
    for (; t + 6 <= num_tokens; t += 6) tile(6, vectors, a + t * inner, inner, panel, out + t * width, width, add);
    a += t * inner;
    out += t * width;
    switch (num_tokens - t) {
    case 5: tile(5, vectors, a, inner, panel, out, width, add); break;
    case 4: tile(4, vectors, a, inner, panel, out, width, add); break;
    case 3: tile(3, vectors, a, inner, panel, out, width, add); break;
    case 2: tile(2, vectors, a, inner, panel, out, width, add); break;
    case 1: tile(1, vectors, a, inner, panel, out, width, add); break;
    }
}

/* out (T, width) = a (T, inner) @ packed (inner, width), or added to out. */
static void multiply(const float *a, int num_tokens, int inner, const float *packed, float *out, int width, int add) {
    for (int column = 0; column < width; column += PANEL, packed += inner * PANEL) {
        float *to = out + column;
        switch ((width - column) / LANES) {
        case 1: panel_times(1, a, num_tokens, inner, packed, to, width, add); break;
        case 2: panel_times(2, a, num_tokens, inner, packed, to, width, add); break;
        case 3: panel_times(3, a, num_tokens, inner, packed, to, width, add); break;
        default: panel_times(4, a, num_tokens, inner, packed, to, width, add);
        }
    }
}

/* Norm, weight and rotation of one query or key head, in place. Channels lie as pairs. */
static void norm_and_rotate(float *head, const float *weight, const float *rotation, int dim, float eps) {
    rms_norm(head, head, 1, dim, eps);
    for (int i = 0; i < dim; i += 2) {
        float re = head[i] * weight[i], im = head[i + 1] * weight[i + 1];
        head[i] = re * rotation[i] - im * rotation[i + 1];
        head[i + 1] = im * rotation[i] + re * rotation[i + 1];
    }
}

/* The keys and values that one key head of one call attends to. */
typedef struct {
    const float *keys, *values; /* of the head in block 0 */
    const int64_t *blocks;
    int64_t block_floats; /* from one block to the next */
    int block_size, length;
} Context;

/* Ask for the block after the next one: blocks lie anywhere, which the processor cannot guess. */
INLINE void prefetch_block(const float *head_in_block_0, Context c, int b, int start, int dim) {
    if (start + 2 * c.block_size >= c.length) return;
    const float *next = head_in_block_0 + c.blocks[b + 2] * c.block_floats;
    for (int i = 0; i < c.block_size * dim; i += LANES) __builtin_prefetch(next + i);
}

/* Attention of the `group` query heads that share a key head. `score` (group, length rounded up to LANES). */
INLINE void attend(int group, int vectors, const float *query, Context c, float *score, float *out) {
    const int dim = vectors * LANES, stride = (c.length + LANES - 1) / LANES * LANES;
    const float scale = 1.0f / sqrtf((float)dim);
    vec q[4][8], even[4][8], odd[4][8];
    float total[4];
    for (int g = 0; g < group; g++)
        for (int v = 0; v < vectors; v++) q[g][v] = load(query + g * dim + v * LANES) * scale;
    for (int start = 0, b = 0; start < c.length; start += c.block_size, b++) {
        const float *key = c.keys + c.blocks[b] * c.block_floats;
        const int count = c.length - start < c.block_size ? c.length - start : c.block_size;
        prefetch_block(c.keys, c, b, start, dim);
        for (int p = 0; p < count; p++, key += dim)
            for (int g = 0; g < group; g++) {
                vec dot = q[g][0] * load(key);
                for (int v = 1; v < vectors; v++) dot += q[g][v] * load(key + v * LANES);
                score[g * stride + start + p] = sum(dot);
            }
    }
    for (int g = 0; g < group; g++) {
        float *s = score + g * stride;
        for (int p = c.length; p < stride; p++) s[p] = -1e30f;
        const float top = highest(s, stride);
        vec weights = {0};
        for (int p = 0; p < stride; p += LANES) {
            vec e = exp16(load(s + p) - top);
            store(s + p, e);
            weights += e;
        }
        total[g] = sum(weights);
        for (int v = 0; v < vectors; v++) even[g][v] = odd[g][v] = (vec){0};
    }
    for (int start = 0, b = 0; start < c.length; start += c.block_size, b++) {
        const float *value = c.values + c.blocks[b] * c.block_floats, *s = score + start;
        const int count = c.length - start < c.block_size ? c.length - start : c.block_size;
        prefetch_block(c.values, c, b, start, dim);
        int p = 0;
        for (; p + 2 <= count; p += 2, value += 2 * dim)
            for (int g = 0; g < group; g++)
                for (int v = 0; v < vectors; v++) {
                    even[g][v] += s[g * stride + p] * load(value + v * LANES);
                    odd[g][v] += s[g * stride + p + 1] * load(value + dim + v * LANES);
                }
        for (; p < count; p++)
            for (int g = 0; g < group; g++)
                for (int v = 0; v < vectors; v++) even[g][v] += s[g * stride + p] * load(value + v * LANES);
    }
    for (int g = 0; g < group; g++)
        for (int v = 0; v < vectors; v++) store(out + g * dim + v * LANES, (even[g][v] + odd[g][v]) / total[g]);
}

#define ATTEND(G, V) \
    if (group == G && vectors == V) return attend(G, V, query, context, score, out)
static void attend_group(int group, int vectors, const float *query, Context context, float *score, float *out) {
    ATTEND(1, 1); ATTEND(1, 2); ATTEND(1, 4); ATTEND(1, 8);
    ATTEND(2, 1); ATTEND(2, 2); ATTEND(2, 4); ATTEND(2, 8);
    ATTEND(4, 1); ATTEND(4, 2); ATTEND(4, 4); ATTEND(4, 8);
}

/* The tokens of a pass, and where their calls lie. */
typedef struct {
    int num_tokens;
    const int64_t *positions, *slots, *table;
    int64_t table_width;
} Tokens;

/* Keys (is_value 0) or values (1) of one head of one block of one layer: (block_size, D). */
static float *kv_of(const Model *m, int layer, int64_t block, int is_value, int head) {
    return m->kv + ((((layer * (int64_t)m->num_blocks + block) * 2 + is_value) * m->kv_heads + head) * m->block_size) * m->head_dim;
}

/* Rotate queries and keys of `qkv`, write keys and values to their blocks. */
static void place(const Model *m, int layer, float *qkv, int width, const Tokens *tokens) {
    const int dim = m->head_dim, num_qk = m->heads + m->kv_heads;
    for (int t = 0; t < tokens->num_tokens; t++, qkv += width) {
        const int64_t position = tokens->positions[t], at = position % m->block_size * dim;
        const int64_t block = tokens->table[tokens->slots[t] * tokens->table_width + position / m->block_size];
        const float *rotation = m->rope + position * dim;
        for (int h = 0; h < num_qk; h++) norm_and_rotate(qkv + h * dim, m->layers[layer].qk_norm + h * dim, rotation, dim, m->eps);
        for (int h = 0; h < m->kv_heads; h++) {
            memcpy(kv_of(m, layer, block, 0, h) + at, qkv + (m->heads + h) * dim, 4 * dim);
            memcpy(kv_of(m, layer, block, 1, h) + at, qkv + (num_qk + h) * dim, 4 * dim);
        }
    }
}

/* Head by head, so that a prefix that many calls share is read from the cache by all but the first. */
static void attention(const Model *m, int layer, const float *qkv, int width, const Tokens *tokens, float *score, float *out) {
    const int dim = m->head_dim, group = m->heads / m->kv_heads;
    const int64_t block_floats = 2ll * m->kv_heads * m->block_size * dim;
    for (int h = 0; h < m->kv_heads; h++)
        for (int t = 0; t < tokens->num_tokens; t++) {
            Context context = {kv_of(m, layer, 0, 0, h), kv_of(m, layer, 0, 1, h), tokens->table + tokens->slots[t] * tokens->table_width,
                               block_floats, m->block_size, (int)tokens->positions[t] + 1};
            attend_group(group, dim / LANES, qkv + (int64_t)t * width + h * group * dim, context, score,
                         out + ((int64_t)t * m->heads + h * group) * dim);
        }
}

/* act (T, I) = silu(gate) * up of gate_up (T, 2 I). */
static void swiglu(const float *gate_up, float *act, int num_tokens, int inner) {
    for (int t = 0; t < num_tokens; t++, gate_up += 2 * inner, act += inner)
        for (int i = 0; i < inner; i += LANES) {
            vec gate = load(gate_up + i);
            store(act + i, gate / (1.0f + exp16(-gate)) * load(gate_up + inner + i));
        }
}

/* Floats of scratch that a pass of `num_tokens` over calls of up to `num_positions` needs. */
int64_t scratch_floats(const Model *m, int64_t num_tokens, int64_t num_positions) {
    int64_t width = (m->heads + 2 * m->kv_heads) * m->head_dim;
    int64_t per_token = 2 * m->hidden + width + m->heads * m->head_dim + 3 * (int64_t)m->intermediate;
    return num_tokens * per_token + 4 * (num_positions + LANES);
}

/* logits (W, head_width): of the tokens whose indices are wanted[0..W-1]. */
void forward(const Model *m, int64_t num_tokens, const int64_t *token_ids, const int64_t *positions, const int64_t *slots,
             const int64_t *table, int64_t table_width, int64_t num_wanted, const int64_t *wanted, float *scratch, float *logits) {
    const Tokens tokens = {(int)num_tokens, positions, slots, table, table_width};
    const int hidden = m->hidden, inner = m->intermediate, heads_dim = m->heads * m->head_dim;
    const int width = heads_dim + 2 * m->kv_heads * m->head_dim, n = (int)num_tokens;
    float *x = scratch, *norm = x + num_tokens * hidden, *qkv = norm + num_tokens * hidden, *mixed = qkv + num_tokens * width;
    float *gate_up = mixed + num_tokens * heads_dim, *act = gate_up + num_tokens * 2 * inner, *score = act + num_tokens * inner;
    for (int t = 0; t < n; t++) memcpy(x + (int64_t)t * hidden, m->embedding + token_ids[t] * hidden, 4 * hidden);
    for (int l = 0; l < m->num_layers; l++) {
        const Layer *layer = &m->layers[l];
        rms_norm(x, norm, n, hidden, m->eps);
        multiply(norm, n, hidden, layer->qkv, qkv, width, 0);
        place(m, l, qkv, width, &tokens);
        attention(m, l, qkv, width, &tokens, score, mixed);
        multiply(mixed, n, heads_dim, layer->out, x, hidden, 1);
        rms_norm(x, norm, n, hidden, m->eps);
        multiply(norm, n, hidden, layer->gate_up, gate_up, 2 * inner, 0);
        swiglu(gate_up, act, n, inner);
        multiply(act, n, inner, layer->down, x, hidden, 1);
    }
    for (int w = 0; w < num_wanted; w++) memcpy(norm + (int64_t)w * hidden, x + wanted[w] * hidden, 4 * hidden);
    rms_norm(norm, norm, (int)num_wanted, hidden, m->eps);
    multiply(norm, (int)num_wanted, hidden, m->head, logits, m->head_width, 0);
}

/* First token whose cumulative weight e^(logit - top) exceeds `target`, of weights that are not 0. */
static int invert(const float *logits, int width, int vocabulary, float top, double target) {
    double below = 0;
    int token = 0;
    for (int i = 0; i < width; i += LANES) {
        vec weight = exp16(load(logits + i) - top);
        double block = sum(weight);
        if (below + block <= target && i + LANES < width) {
            below += block;
            continue;
        }
        for (int j = 0; j < LANES && i + j < vocabulary; j++) {
            if (weight[j] < 1e-37f) continue;
            token = i + j;
            below += weight[j];
            if (below > target) break;
        }
        break;
    }
    return token;
}

/* Draw one token per row of logits (W, head_width); T = 0 takes the most likely. Overwrites logits.
 * logprobs: log_softmax(logits / T) of the token drawn, with T = 1 where T is 0. */
void sample(const Model *m, int64_t num_wanted, float *logits, const float *temperatures, const double *draws, int64_t *tokens, float *logprobs) {
    const int width = m->head_width;
    for (int64_t w = 0; w < num_wanted; w++, logits += width) {
        if (temperatures[w] > 0 && temperatures[w] != 1.0f)
            for (int i = 0; i < m->vocabulary; i++) logits[i] /= temperatures[w];
        for (int i = m->vocabulary; i < width; i++) logits[i] = -1e30f;
        const float top = highest(logits, width);
        double total = 0;
        for (int i = 0; i < width; i += LANES) total += sum(exp16(load(logits + i) - top));
        int token = 0;
        if (temperatures[w] > 0) token = invert(logits, width, m->vocabulary, top, draws[w] * total);
        else while (logits[token] != top) token++;
        tokens[w] = token;
        logprobs[w] = (float)((double)(logits[token] - top) - log(total));
    }
}

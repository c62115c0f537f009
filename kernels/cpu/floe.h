// The C interface of the CPU kernels. Everything a caller may use is here; `native.py` is its only user.
//
// Shapes: B tokens, P (token, expert) calls, H hidden size, F neurons of an expert, E experts, N active neurons.
// Every function checks sizes and indices before it reads or writes through a pointer, and returns a negative
// FLOE_* code when they do not fit. Weights need no alignment; 64 bytes are faster.
#ifndef FLOE_H
#define FLOE_H

#include <stdint.h>

#if defined(_WIN32)
#define FLOE_API __declspec(dllexport)
#elif defined(__GNUC__)
#define FLOE_API __attribute__((visibility("default")))
#else
#define FLOE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum {
    FLOE_OK = 0,
    FLOE_BAD_SHAPE = -1, // a width, group or size that no layout has
    FLOE_BAD_INDEX = -2, // a token, expert, neuron or slot out of range, or offsets that do not rise
    FLOE_REPEATED = -3,  // a neuron twice in one call
    FLOE_NO_MEMORY = -4,
    FLOE_UNSUPPORTED = -5,  // this processor or system cannot do it
    FLOE_STOPPED = -6,      // somebody asked for it
    FLOE_NOT_A_NUMBER = -7, // logits that nothing can be drawn from
};

// One stored vector of `n` values: layouts.VectorLayout. `bfloat16` says what 16-bit values are.
typedef struct {
    int64_t n;
    int64_t group;
    int32_t bits;
    int32_t bfloat16;
} floe_vector;

FLOE_API int floe_version(void);

// The instruction set in use ("avx512", "avx2", "portable") and why; select NULL for the best that this CPU has.
FLOE_API const char *floe_isa(void);
FLOE_API const char *floe_isa_reason(void);
FLOE_API int floe_select_isa(const char *name);

// What a token may skip by the router's weights (kernels/rule.py: Rule). parts: 2 where experts are taken as halves.
typedef struct {
    double drop, major;
    int32_t parts, weighed;
} floe_rule;

// What a rule leaves of a router's choice, index and weights (tokens, top_k): P = tokens · top_k · parts calls, of
// which those that are left out get an infinite threshold. signal (experts): what |up · x| must reach; product and
// late, which may be NULL, likewise for products and for rows that are absent. Fills all outputs (P), products and
// lates where asked.
FLOE_API int floe_select(const floe_rule *rule, int64_t tokens, int64_t top_k, const int64_t *index,
                         const float *weights, int64_t experts, const float *signal, const float *product,
                         const float *late, int64_t *call_token, int64_t *call_expert, float *call_weight,
                         float *thresholds, float *products, float *lates);

// v = up_e · x for P calls, keeping neurons with |v| >= threshold, or NaN; none where the threshold is infinite. Fills
// offsets (P + 1) and returns N; the neurons wait in the calling thread until it fetches them with floe_up_take.
// digits: 3 keeps float32's precision of x (about 22 bits), 2 is enough for 16-bit x (15 bits), 1 rounds it to 8 bits.
FLOE_API int64_t floe_up_gemv(const float *x, int64_t tokens, const floe_vector *row, const uint8_t *q,
                              const uint8_t *scale, const uint8_t *zero, int64_t experts, int64_t neurons,
                              int64_t calls, const int64_t *call_token, const int64_t *call_expert,
                              const float *thresholds, int digits, int threads, int64_t *offsets);
FLOE_API int floe_up_take(int64_t count, int64_t *neurons, float *values);

// y[token] = sum over calls of weight · sum_n silu(gate_n · x) v_n down_n; y is (tokens, H), written whole.
// Neuron n of expert e is row e · neurons + n, or in a pool of slot_count rows, row slots[e · neurons + n].
// down_thresholds (P) or NULL: neurons with |silu(gate · x) v| below it are left out, and their down half unread. Fills
// kept (P): how many neurons of each call were not left out.
FLOE_API int floe_sparse_swiglu(const float *x, int64_t tokens, const floe_vector *gate, const floe_vector *down,
                                const uint8_t *rows, int64_t experts, int64_t neurons, int64_t row_bytes,
                                const int32_t *slots, int64_t slot_count, int64_t calls, const int64_t *call_token,
                                const int64_t *call_expert, const float *weights, const int64_t *offsets,
                                const int64_t *active, const float *values, const float *down_thresholds, int digits,
                                int threads, float *y, int64_t *kept);

// The one after the other: up projections as in the first, rows as in the second. Fills counts (P, 2): how many neurons
// of each call were active, and how many of them were not left out.
FLOE_API int floe_moe_step(const float *x, int64_t tokens, const floe_vector *up, const uint8_t *q,
                           const uint8_t *scale, const uint8_t *zero, const floe_vector *gate, const floe_vector *down,
                           const uint8_t *rows, int64_t experts, int64_t neurons, int64_t row_bytes,
                           const int32_t *slots, int64_t slot_count, int64_t calls, const int64_t *call_token,
                           const int64_t *call_expert, const float *weights, const float *thresholds,
                           const float *down_thresholds, int digits, int threads, float *y, int64_t *counts);

// y = x · Wᵀ for W of `width` rows: x (tokens, row->n) -> y (tokens, width), written whole.
FLOE_API int floe_linear(const float *x, int64_t tokens, const floe_vector *row, const uint8_t *q, const uint8_t *scale,
                         const uint8_t *zero, int64_t width, int digits, int threads, float *y);

// A dense matrix: rows of float32 values in q (row.bits is 32), or codes as in floe_linear. bias: (rows) or NULL.
typedef struct {
    floe_vector row;
    int64_t rows;
    const uint8_t *q, *scale, *zero;
    const float *bias;
} floe_matrix;

// The dense part of one layer; D is the width of a head. window: how many tokens a query sees, itself included, 0 all.
// qkv: queries of all heads, keys and values of all key heads. before, after: (H) weights of the norms. q_norm, k_norm:
// NULL, or (D) if each_head, else (heads · D) and (kv_heads · D) for all heads together. clip: INFINITY for none.
// router: (experts, H), or NULL. shares: whether the weights of the chosen experts are made to sum to 1. half: whether
// keys and values are kept in float16, not float32.
typedef struct {
    int64_t hidden, heads, kv_heads, dim, window, experts, top_k;
    int32_t each_head, shares, half;
    float eps, scale, clip;
    const float *before, *after, *q_norm, *k_norm, *router;
    floe_matrix qkv, out;
} floe_dense_layer;

// One token before a layer's experts. x (H) is the residual stream, added (H) or NULL what the block before gave.
// rope: (2, D) cosines and sines of the position, the first half of the sines negated. kv: (capacity, 2, kv_heads, D)
// keys and values of the tokens before; the token's own are written at `position`. Fills stream (H), the residual after
// attention; hidden (H), what the block is given; and with a router the top_k experts in index and their weights.
FLOE_API int floe_dense_step(const floe_dense_layer *layer, const float *x, const float *added, const float *rope,
                             void *kv, int64_t capacity, int64_t position, int digits, int threads, float *stream,
                             float *hidden, int64_t *index, float *weights);

// A layer's experts and what a token may skip of them. experts: halves of them where rule.parts is 2. thresholds,
// down_thresholds: (experts); the latter NULL for none.
typedef struct {
    floe_vector up, gate, down;
    const uint8_t *q, *scale, *zero, *rows;
    int64_t experts, neurons, row_bytes;
    const float *thresholds, *down_thresholds;
    floe_rule rule;
} floe_expert_layer;

// One token through all layers: floe_dense_step, then floe_moe_step of what is left of the router's choice. x (H): its
// embedding, in the end the residual stream with what the last layer added. kv: of each layer. stop: looked at before
// each layer's experts; where it is not 0, FLOE_STOPPED is returned and x is of no use. Fills index and weights
// (layers, top_k), and counts (layers, top_k, 2, 2): of an expert's halves, or of the whole in the first place, how
// many neurons were active and how many not left out; -1 for what was left out whole.
FLOE_API int floe_token_step(int64_t layers, const floe_dense_layer *const *dense, const floe_expert_layer *experts,
                             float *x, const float *rope, void *const *kv, int64_t capacity, int64_t position,
                             int dense_digits, int expert_digits, int threads, const int32_t *stop, int64_t *index,
                             float *weights, int64_t *counts);

// What lies before the first layer and behind the last: embedding (vocabulary, H), weights of the norm (H), and head,
// which gives the logits.
typedef struct {
    int64_t hidden, vocabulary;
    float eps;
    const float *embedding, *norm;
    floe_matrix head;
} floe_ends;

// logits (vocabulary) of x (H), the residual stream behind the last layer.
FLOE_API int floe_head(const floe_ends *ends, const float *x, int digits, int threads, float *logits);

// How a token is drawn (engine/events.py: Sampling); temperature 0 takes the likeliest.
typedef struct {
    double temperature, top_p, min_p, penalty;
    int64_t top_k;
} floe_sampling;

// A token by a number from [0, 1). seen (count) or NULL: not 0 for tokens that are there already, to which the penalty
// applies.
FLOE_API int64_t floe_draw(const floe_sampling *sampling, const float *logits, int64_t count, const uint8_t *seen,
                           double uniform);

typedef struct {
    int64_t layers;
    const floe_dense_layer *const *dense;
    const floe_expert_layer *experts;
    floe_ends ends;
} floe_model;

// An answer goes on behind `token`: floe_token_step, floe_head and floe_draw, again with the token drawn, until there
// are `most`, or so many seconds have passed, or one of `last` was drawn, or stop is not 0. rope: of positions from
// `position` on. uniforms: `most` numbers from [0, 1). Returns how many tokens were drawn, and fills for each of them
// tokens, at (when, in seconds since the call), index, weights and counts as floe_token_step; seen, if not NULL, is
// kept up to date. FLOE_STOPPED if that was before the first.
FLOE_API int64_t floe_decode(const floe_model *model, const floe_sampling *sampling, const float *rope, void *const *kv,
                             int64_t capacity, int64_t position, int dense_digits, int expert_digits, int threads,
                             const int32_t *stop, int64_t token, int64_t most, double seconds, const int64_t *last,
                             int64_t last_count, uint8_t *seen, const double *uniforms, int64_t *tokens, double *at,
                             int64_t *index, float *weights, int64_t *counts);

// One expert over many tokens: y[t] = sum_n silu(gate_n · x_t) v_nt down_n over the neurons with |v_nt| >=
// thresholds[t], v = up · x, and |silu(gate_n · x_t) v_nt| >= down_thresholds[t], or NaN; y is (tokens, H), written
// whole. down_thresholds may be NULL. Pointers are to the expert's own weights. Returns how many (neuron, token) pairs
// were active, and in kept how many reached the second threshold too.
FLOE_API int64_t floe_expert_swiglu(const float *x, int64_t tokens, const floe_vector *up, const uint8_t *q,
                                    const uint8_t *scale, const uint8_t *zero, const floe_vector *gate,
                                    const floe_vector *down, const uint8_t *rows, int64_t neurons, int64_t row_bytes,
                                    const float *thresholds, const float *down_thresholds, int digits, int threads,
                                    float *y, int64_t *kept);

// out[i] = rows[index[i]]; pool[slot[i]] = records[i].
FLOE_API int floe_gather_rows(const uint8_t *rows, int64_t count, int64_t row_bytes, const int64_t *index,
                              int64_t wanted, int threads, uint8_t *out);
FLOE_API int floe_pool_scatter(uint8_t *pool, int64_t slots, int64_t row_bytes, const int64_t *slot, int64_t count,
                               int threads, const uint8_t *records);

// The tables of a pool of rows, shapes and words as in `kernels/pool.py`: its Rule, Means and RowTable. One thread's.
enum {
    FLOE_POOL_STEP,
    FLOE_POOL_FINDS,
    FLOE_POOL_BROUGHT,
    FLOE_POOL_LAYER,
    FLOE_POOL_FREE,
    FLOE_POOL_HAND,
    FLOE_POOL_SPARE
};

typedef struct {
    int32_t word, key, mark;
    float mean;
} floe_cell;

typedef struct {
    int64_t layers, experts, neurons, capacity;
    int32_t by_score, marks_use;
    int64_t sample, smallest_window;
    double turn, use_rate, largest_growth;
    float prefetch_worth;
    const double *recent;
    double *growth;
    float *raw;
    int32_t *slots, *free_slots;
    floe_cell *cells;
    int64_t *residents, *counters;
} floe_pool;

// Where active neurons are. Fills parts, three times (P + 1) offsets, and lists, six times (N): positions and slots of
// rows that are there, the same of those on their way, positions and keys of absent ones.
FLOE_API int floe_pool_locate(const floe_pool *pool, int64_t layer, int64_t width, int64_t calls,
                              const int64_t *experts, const int64_t *offsets, const int64_t *neurons, int64_t *parts,
                              int64_t *lists);

// Slots for the first of `count` absent keys; returns for how many. Nothing has changed where it returns an error.
FLOE_API int64_t floe_pool_reserve(const floe_pool *pool, int64_t layer, int64_t count, const int64_t *keys, int urgent,
                                   int32_t *slots);

// Gives up rows until so many slots are free, as far as there are any, and keeps these for urgent rows.
FLOE_API int floe_pool_spare(const floe_pool *pool, int64_t wanted);

// Filling rows have arrived, or never will. Nothing has changed where it returns an error.
FLOE_API int floe_pool_settle(const floe_pool *pool, int64_t count, const int32_t *slots, int arrived);

// The first `kept` neurons of each call of a part, and the rest: two times (P + 1) offsets, and to at_out and
// places_out the one behind the other.
FLOE_API int floe_cut(int64_t calls, const int64_t *offsets, const int64_t *kept, const int64_t *at,
                      const int64_t *places, int64_t *offsets_out, int64_t *at_out, int64_t *places_out);

// The slots of a transfer as 64-bit places, if rows and slots are in range and no slot is named twice.
FLOE_API int floe_landing(int64_t count, const int64_t *index, const int32_t *slots, int64_t rows, int64_t capacity,
                          int64_t *places);

// Ask for huge pages behind a buffer. FLOE_UNSUPPORTED where the system has none to give.
FLOE_API int floe_advise_hugepages(void *data, int64_t bytes);

// Read memory as fast as plain loads go, for a benchmark's floor: all of it, or the rows listed.
FLOE_API int floe_read(const uint8_t *data, int64_t bytes, int threads, uint64_t *checksum);
FLOE_API int floe_read_rows(const uint8_t *rows, int64_t count, int64_t row_bytes, const int64_t *index, int64_t wanted,
                            int threads, uint64_t *checksum);

#ifdef __cplusplus
}
#endif
#endif

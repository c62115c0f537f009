// The C interface of the CPU kernels. It is written down only here, in floe_offload.h and in floe_pack.h:
// `binding.py` reads these files, and the library reports the sizes and offsets that the compiler gave their records
// (`floe_layout`). `header.py` says which part of C may stand here.
//
// Shapes: B tokens, P (token, expert) calls, H hidden size, F neurons of an expert, E experts, N active neurons.
// Every function checks sizes and indices before it reads or writes through a pointer, and returns a negative
// FLOE_* code when they do not fit. Weights need no alignment; 64 bytes are faster. digits: 3 keeps float32's precision
// of x (about 22 bits), 2 is enough for 16-bit x (15 bits), 1 rounds it to 8 bits.
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

#define FLOE_OPTIONAL // may be NULL

#ifdef __cplusplus
extern "C" {
#endif

enum {
    FLOE_OK = 0,
    FLOE_MORE = 1,       // done in part: call again
    FLOE_BAD_SHAPE = -1, // a width, group or size that no layout has, or sizes that do not fit each other
    FLOE_BAD_INDEX = -2, // a token, expert, neuron, slot or position out of range, or offsets that do not rise
    FLOE_REPEATED = -3,  // a neuron twice in one call
    FLOE_NO_MEMORY = -4,
    FLOE_UNSUPPORTED = -5,  // this processor or system cannot do it
    FLOE_STOPPED = -6,      // somebody asked for it
    FLOE_NOT_A_NUMBER = -7, // logits that nothing can be drawn from
    FLOE_LINK_FAILED = -8,  // the link to a device ended
    FLOE_DEVICE_FAILED = -9,
};

// How many numbers follow, a mark of all declarations, then the size of each record and its fields'
// offsets.
FLOE_API const int64_t *floe_layout(void);

// The instruction set in use ("avx512", "avx2", "portable") and why; select NULL for the best that this CPU has.
FLOE_API const char *floe_isa(void);
FLOE_API const char *floe_isa_reason(void);
FLOE_API int floe_select_isa(FLOE_OPTIONAL const char *name);

// What numbers of a caller's kind are.
enum { FLOE_FLOAT32, FLOE_FLOAT16, FLOE_BFLOAT16 };

// ---- experts

// One stored vector of `n` values: layouts.VectorLayout. `bfloat16` says what 16-bit values are; scale_bytes: of a
// group's scale, and of its zero: 2 for float16, 1 for codes of them.
typedef struct {
    int64_t n, group;
    int32_t bits, bfloat16, scale_bytes;
} floe_vector;

// The function of a projection's product with x, with its bias added: activation.FUNCTIONS, in their order.
enum {
    FLOE_PLAIN,
    FLOE_SILU,
    FLOE_CLAMPED_GATE,
    FLOE_CLAMPED_UP,
    FLOE_GELU,
    FLOE_LIMITED_GATE,
    FLOE_LIMITED_UP,
    FLOE_ONE,
    FLOE_RELU2
};

// The signal projections of a layer: weights.SignalWeights. function: of them; the other one's is in floe_rows. bias:
// (experts, neurons).
typedef struct {
    floe_vector row;
    int32_t function;
    const uint8_t *q, *scale, *zero;
    FLOE_OPTIONAL const float *bias;
    int64_t experts, neurons;
} floe_signal;

// A layer's rows, of the projection that is not the signal and of down. Neuron n of expert e is row e · neurons + n:
// weights.ExpertRows. function: FLOE_ONE where there is no such projection; of `other`, n alone is read. biased:
// whether a float32 follows the row of the other projection (layouts.RowLayout.bias_at).
typedef struct {
    floe_vector other, down;
    int32_t function, biased;
    const uint8_t *data;
    int64_t experts, neurons, row_bytes;
} floe_rows;

// What a token may skip by the router's weights (kernels/rule.py: Rule). parts: 2 where experts are taken as halves.
typedef struct {
    double drop, major;
    int32_t parts, weighed;
} floe_rule;

// What a neuron must reach in each expert, or half: types.Limits.
typedef struct {
    int64_t experts;
    const float *signal;
    FLOE_OPTIONAL const float *product, *late;
} floe_limits;

// P calls (types.Calls and Work): threshold is what the signal |v| must reach, infinite for a call that is left out;
// product what |h| must reach, late what |v| must reach for rows that are absent.
typedef struct {
    int64_t count;
    int64_t *token, *expert;
    float *weight;
    FLOE_OPTIONAL float *threshold, *product, *late;
} floe_calls;

// The active neurons of P calls: types.Active.
typedef struct {
    const int64_t *offsets;
    const int32_t *neurons;
    const float *values;
} floe_active;

// What a rule leaves of a router's choice, index and weights (tokens, top_k): fills calls of tokens · top_k · parts.
FLOE_API int floe_select(const floe_rule *rule, const floe_limits *limits, int64_t tokens, int64_t top_k,
                         const int64_t *index, const float *weights, const floe_calls *calls);

// v = s(signal_e · x + bias), s the signal's function, keeping neurons with |v| >= threshold, or NaN. Fills offsets (P
// + 1) and returns N; the neurons wait in the calling thread until it fetches them with floe_signal_take.
FLOE_API int64_t floe_signal_gemv(const float *x, int64_t tokens, const floe_signal *signal, const floe_calls *calls,
                                  int digits, int threads, int64_t *offsets);
FLOE_API int floe_signal_take(int64_t count, int32_t *neurons, float *values);

// y[token] = sum over calls of weight · sum_n h_n down_n, h_n = o(other_n · x + bias_n) v_n, o the rows' function; y is
// (tokens, H), written whole. Neurons with |h_n| below the call's `product` are left out, and their down half unread.
// Fills kept (P): how many were not.
FLOE_API int floe_sparse_swiglu(const float *x, int64_t tokens, const floe_rows *rows, const floe_calls *calls,
                                const floe_active *active, int digits, int threads, float *y, int64_t *kept);

// The one after the other. Fills counts (P, 2): how many neurons of each call were active, and how many of them were
// not left out.
FLOE_API int floe_moe_step(const float *x, int64_t tokens, const floe_signal *signal, const floe_rows *rows,
                           const floe_calls *calls, int digits, int threads, float *y, int64_t *counts);

// The same expert by expert, for many tokens: each row is read once for all tokens that share its expert.
FLOE_API int floe_experts_swiglu(const float *x, int64_t tokens, const floe_signal *signal, const floe_rows *rows,
                                 const floe_calls *calls, int digits, int threads, float *y, int64_t *counts);

// One expert over many tokens: y[t] = sum_n h_nt down_n over the neurons with |v_nt| >= thresholds[t] and |h_nt| >=
// down_thresholds[t], or NaN; v and h as above, y is (tokens, H), written whole. Fills counts (2): how many (neuron,
// token) pairs were active, and how many reached the second threshold too.
FLOE_API int floe_expert_swiglu(const float *x, int64_t tokens, const floe_signal *signal, const floe_rows *rows,
                                int64_t expert, const float *thresholds, FLOE_OPTIONAL const float *down_thresholds,
                                int digits, int threads, float *y, int64_t *counts);

// ---- the dense part of a layer

// A matrix: rows of float32 values in q (row.bits is 32, without scales), or codes. bias: (rows).
typedef struct {
    floe_vector row;
    int64_t rows;
    const uint8_t *q;
    FLOE_OPTIONAL const uint8_t *scale, *zero;
    FLOE_OPTIONAL const float *bias;
} floe_matrix;

// y = x · Wᵀ + bias for codes: x (tokens, row.n) -> y (tokens, rows), written whole.
FLOE_API int floe_linear(const float *x, int64_t tokens, const floe_matrix *weights, int digits, int threads, float *y);

// A norm: x / rms(x) · weight + bias, each (H). centred: of x - mean(x) instead of x.
typedef struct {
    int32_t centred;
    const float *weight;
    FLOE_OPTIONAL const float *bias;
} floe_norm;

// How a layer chooses its experts: weight (experts, H), NULL where it has none. kind: a score is the softmax of a
// logit, or its sigmoid; SparseMixer chooses by logits (kernels/step.py), jitter: how far below the best of them it
// looks; then neither correction nor groups. bias: (experts), of the logits. correction: (experts), added to scores for
// the choice alone. Experts are chosen from top_groups of the groups that they are divided into: those with the best
// expert, or, with a correction, the best pair. shares: whether the weights of the chosen experts are made to sum to 1,
// before scale. down_bias: (experts, H) of the experts' last matrices, which joins the residual stream. factors:
// (experts), of the chosen ones' weights. norm: (H) of the residual stream, where the logits are of that.
enum { FLOE_SOFTMAX, FLOE_SIGMOID, FLOE_SPARSEMIXER };

typedef struct {
    int64_t experts, top_k, groups, top_groups;
    int32_t kind, shares;
    float scale, jitter;
    FLOE_OPTIONAL const float *weight, *bias, *correction, *down_bias, *factors, *norm;
} floe_router;

// y = down · (silu(gate · x) * (up · x)): a shared expert, or a layer without experts. both: gate, then up, so many
// neurons of each. scale: (H) of a gate whose sigmoid scales y. gelu: whether the gate's function is gelu by tanh.
typedef struct {
    int64_t neurons;
    int32_t gelu;
    floe_matrix both, down;
    FLOE_OPTIONAL const float *scale;
} floe_swiglu;

// Keys and values of all heads are made of one vector of a token, which alone is stored, with a key that all heads
// share behind it, turned by rope. Of a head, `still` numbers of query and key are not turned and `turned` are; `value`
// are its value's. norm: (rank) of the vector, with its eps. made: (heads · (still + value), rank). asked: (heads ·
// (still + turned), ...) where queries are made of a vector too, behind a norm.
typedef struct {
    int64_t rank, still, turned, value;
    float eps;
    const float *norm;
    floe_matrix made;
    FLOE_OPTIONAL const floe_matrix *asked;
    FLOE_OPTIONAL const float *asked_norm;
} floe_latent;

// A gated delta rule instead of attention (Gated DeltaNet, arXiv 2412.06464): each of the layer's heads, D wide, keeps
// a state (key_dim, D) and belongs to one of kv_heads heads of queries and keys. A causal convolution of `taps` tokens
// comes first. conv: (taps, channels) of the queries, keys and values of all heads, one behind the other. decay, bias:
// (heads). norm: (D) with its eps, of the output before its gate. gates: (2 · heads, hidden), of beta, then decay.
typedef struct {
    int64_t key_dim, taps;
    float eps;
    const float *conv, *decay, *bias, *norm;
    floe_matrix gates;
} floe_delta;

// A short convolution instead of attention: first gives b, c and x, H numbers each, of which c · conv(b · x) goes back.
// conv: (taps, H), the oldest token's factors first. bias: (H) of its result.
typedef struct {
    int64_t taps;
    const float *conv;
    FLOE_OPTIONAL const float *bias;
} floe_convolution;

// Norms behind a layer's parts, too; `beside`, if anything, then joins the experts, and not the stream. (H) each:
// mixed: of what the mixer adds, before: of what is given to `beside`, NULL where that is what experts are given.
// beside, experts: of what these give, NULL for none. both: of their sum. scale: of the stream behind the layer.
typedef struct {
    const float *mixed, *both;
    FLOE_OPTIONAL const float *before, *beside, *experts;
    float scale;
} floe_sandwich;

// The dense part of one layer. before, after: norms. first: to what the mixer is given, out: back.
// beside: what every token is given besides experts; without a router, it must be there with a sandwich.
//
// The mixer is attention where neither `delta` nor `convolution` is there; D is the width of a head. first: queries of
// all heads, keys and values of all key heads. window: how many tokens a query sees, itself included, 0 all. q_norm,
// k_norm: (D) if each_head, else (heads · D) and (kv_heads · D) for all heads together. clip: INFINITY for none.
// stored: the form of keys and values, FLOE_KEPT_*: numbers, or codes of 8 bits with scales (kernels/entries.py).
// sinks: (heads) scores of a token without a value that every query sees. gated: behind the queries, `first` gives a
// gate of each number of a head's output. keys_alone: it gives no values: they are the keys, as projected. v_normed:
// values are divided by their root mean square. queries_alone: `first` gives queries and nothing else; they see what
// another layer has stored of the tokens before this one, and nothing is stored: not with a gate, keys_alone or latent,
// nor at position 0. rope_at: where a layer's cosines and sines begin. latent: heads meet
// what is stored like one key head, D = rank + turned, whose first numbers are its value; first: queries, or the vector
// that they are made of, the stored vector and the key behind it; neither codes nor norms of heads. delta: first:
// queries, keys and values of the convolution, then the output's gates; scale: of queries.
enum { FLOE_KEPT_FLOAT, FLOE_KEPT_HALF, FLOE_KEPT_CODES };

typedef struct {
    int64_t hidden, heads, kv_heads, dim, window, rope_at;
    int32_t each_head, stored, gated, keys_alone, v_normed, queries_alone;
    float eps, scale, clip;
    floe_norm before, after;
    FLOE_OPTIONAL const float *q_norm, *k_norm, *sinks;
    floe_matrix first, out;
    floe_router router;
    FLOE_OPTIONAL const floe_swiglu *beside;
    FLOE_OPTIONAL const floe_latent *latent;
    FLOE_OPTIONAL const floe_delta *delta;
    FLOE_OPTIONAL const floe_convolution *convolution;
    FLOE_OPTIONAL const floe_sandwich *sandwich;
} floe_dense_layer;

// Where a token is. rope: cosines and sines (2, D) of its position, of what rope turns of a head if that is not all,
// the first half of the sines negated; those of other layers behind them. kv: of each layer, (capacity) entries of its
// text; its own is written. Of a layer with a state, `states` of them, two or more (taps - 1 tokens before the
// convolution, then those of heads, if any), float32: the one before a token is at its position modulo `states`, and
// the one after it is written to the next place, so that a token may be computed again, or some of them.
typedef struct {
    const float *rope;
    void *const *kv;
    int64_t capacity, position, states;
} floe_place;

// What a layer's experts are given, for each token. stream (H): the residual after attention and what is beside the
// experts. hidden (H). index, weights: the top_k experts; unused without a router. scores: (experts) of all. parallel:
// (H), what `beside` gives where a sandwich joins it with experts.
typedef struct {
    float *stream, *hidden;
    FLOE_OPTIONAL int64_t *index;
    FLOE_OPTIONAL float *weights, *scores, *parallel;
} floe_routed;

// The gated delta rule of a prompt, of each of `heads` heads (D wide): qkv (tokens, channels + heads · D) as projected,
// and gates (tokens, 2 · heads), each with a stride, -> out (tokens, heads · D), before the last projection. before:
// the state before the prompt, after: the one behind it. along: where the states behind every 64 tokens go, NULL where
// they are not wanted; as many as there are before the last token.
FLOE_API int floe_delta_rule(const floe_delta *delta, int64_t heads, int64_t kv_heads, int64_t dim, float scale,
                             int64_t tokens, const float *qkv, int64_t qkv_stride, const float *gates,
                             int64_t gates_stride, const float *before, FLOE_OPTIONAL float *const *along, int threads,
                             float *after, float *out);

// Whether the sizes of a layer fit each other.
FLOE_API int floe_dense_check(const floe_dense_layer *layer);

enum { FLOE_MOST_TOGETHER = 4 }; // tokens, each of another text, or in order of one

// So many tokens before a layer's experts; `number` is the layer's in their places. x (tokens, H) is the residual
// stream, added (tokens, H) what the block before gave. Fills routed.
FLOE_API int floe_dense_step(const floe_dense_layer *layer, int64_t number, int64_t tokens, const float *x,
                             FLOE_OPTIONAL const float *added, const floe_place *places, int digits, int threads,
                             const floe_routed *routed);

// ---- a token through all layers

// A layer's experts, and what a token may skip of them. limits.late is not looked at.
typedef struct {
    floe_signal signal;
    floe_rows rows;
    floe_limits limits;
    floe_rule rule;
} floe_expert_layer;

// experts: of each layer; NULL for one that has none. top_k: of all layers with experts. rope: numbers of a position.
typedef struct {
    int64_t count, top_k, rope;
    const floe_dense_layer *const *dense;
    const floe_expert_layer *const *experts;
} floe_layers;

// Raised by one thread to stop what another one computes.
typedef struct {
    int32_t raised;
} floe_stop;

FLOE_API void floe_stop_set(floe_stop *stop, int raised);

// stop: looked at before each layer's experts.
typedef struct {
    int32_t dense_digits, expert_digits, threads;
    const floe_stop *stop;
} floe_pace;

// What is filled for each layer and token. index, weights: (layers, tokens, top_k). counts: (..., 2, 2), of an
// expert's halves, or of the whole in the first place, how many neurons were active and how many not left out; -1 for
// what was left out whole, and of a layer without experts.
typedef struct {
    int64_t *index;
    float *weights;
    int64_t *counts;
} floe_trace;

// floe_dense_step, floe_select and floe_moe_step, layer after layer. x (tokens, H): embeddings, in the end the residual
// stream with what the last layer added. FLOE_STOPPED if somebody asked for it; x is of no use then.
FLOE_API int floe_token_step(const floe_layers *layers, int64_t tokens, float *x, const floe_place *places,
                             const floe_pace *pace, const floe_trace *trace);

// What lies before the first layer and behind the last: embedding (vocabulary, H), multiplied by `scale`, the norm, and
// head, which gives the logits, cap · tanh(logit / cap) where cap is not 0. In two planes (planes.py), head is the
// first and `rest` the second; spread (groups): the mean square of its weights, of no row more.
typedef struct {
    int64_t hidden, vocabulary;
    float eps, scale, cap;
    const float *embedding;
    floe_norm norm;
    floe_matrix head;
    FLOE_OPTIONAL const floe_matrix *rest;
    FLOE_OPTIONAL const float *spread;
} floe_ends;

// logits (tokens, vocabulary) of x (tokens, H), the residual stream after the last layer, of FLOE_MOST_TOGETHER tokens
// at most. In two planes those are exact that are at most `reach` below the largest, all with INFINITY; others are
// lower than that, and about right.
FLOE_API int floe_head(const floe_ends *ends, int64_t tokens, const float *x, float reach, int digits, int threads,
                       float *logits);

// How a token is drawn (sampling.Filters); temperature 0 takes the likeliest.
typedef struct {
    double temperature, top_p, min_p, penalty;
    int64_t top_k;
} floe_sampling;

// A token by a number from [0, 1). seen (count): not 0 for tokens that are there already, to which the penalty applies.
FLOE_API int64_t floe_draw(const floe_sampling *sampling, const float *logits, int64_t count,
                           FLOE_OPTIONAL const uint8_t *seen, double uniform);

// Tokens to draw behind `token`: `most`, fewer after so many seconds, or with one of `last`. guessed: what the first
// tokens are likely to be, most - 1 of them or none; they go through the layers with `token`, and it ends with the
// first that is not drawn. uniforms: `most` numbers from [0, 1). seen: as in floe_draw, kept up to date. Filled:
// tokens, at, when each was there in seconds, and streams (most, H), the residual streams that they were drawn from.
typedef struct {
    int64_t token, most, last_count;
    double seconds;
    const int64_t *last;
    FLOE_OPTIONAL const int64_t *guessed;
    FLOE_OPTIONAL uint8_t *seen;
    const double *uniforms;
    int64_t *tokens;
    double *at;
    FLOE_OPTIONAL float *streams;
} floe_draws;

// An answer continues: floe_token_step, floe_head and floe_draw, again with the token drawn. place.rope: of positions
// from place.position on; trace: of one token after the other, or, where some go together, as floe_token_step's.
// Returns how many tokens were drawn, FLOE_STOPPED if that was none.
FLOE_API int64_t floe_decode(const floe_layers *layers, const floe_ends *ends, const floe_sampling *sampling,
                             const floe_place *place, const floe_pace *pace, const floe_draws *draws,
                             const floe_trace *trace);

// ---- rows

// out[i] = rows[index[i]]; pool[slot[i]] = records[i].
FLOE_API int floe_gather_rows(const uint8_t *rows, int64_t count, int64_t row_bytes, const int64_t *index,
                              int64_t wanted, int threads, uint8_t *out);
FLOE_API int floe_pool_scatter(uint8_t *pool, int64_t slots, int64_t row_bytes, const int64_t *slot, int64_t count,
                               int threads, const uint8_t *records);

// The tables of a pool of rows, shapes and words as in `kernels/offload/pool.py`: its Rule, Means and RowTable. One
// thread's.
enum {
    FLOE_POOL_FINDS,
    FLOE_POOL_BROUGHT,
    FLOE_POOL_LAYER,
    FLOE_POOL_FREE,
    FLOE_POOL_HAND,
    FLOE_POOL_SPARE,
    FLOE_POOL_VISITING,
    FLOE_POOL_COMING,
    FLOE_POOL_EVICTED,
    FLOE_POOL_ASKED,
    FLOE_POOL_MOST
};

typedef struct {
    int32_t state, key, mark;
    float mean;
} floe_cell;

typedef struct {
    int64_t layers, experts, neurons, capacity;
    int32_t by_score, marks_use;
    int64_t sample, smallest_window;
    double bar_share, turn, use_rate, largest_growth, score_rate, habit_rate;
    float prefetch_worth;
    double *recent, *habit, *growth;
    float *raw;
    int32_t *slots, *free_slots, *visitors;
    floe_cell *cells;
    uint8_t *busy;
    float *bar;
    int64_t *residents, *counters;
} floe_pool;

// Slots for the first of `count` absent keys; returns for how many. Nothing has changed where it returns an error.
FLOE_API int64_t floe_pool_reserve(const floe_pool *pool, int64_t layer, int64_t count, const int64_t *keys, int urgent,
                                   int32_t *slots);

// Slots for visitors, at most `wanted`; returns how many.
FLOE_API int64_t floe_pool_visit(const floe_pool *pool, int64_t wanted, int32_t *slots);

// Lets those of the last visitors (keys and slots: count) stay that are worth it, and evicts for the next step, of
// which 1 / spared of the pool is kept free at most. Fills kept (count), their slots; returns how many. Nothing has
// changed where it returns an error.
FLOE_API int64_t floe_pool_keep(const floe_pool *pool, int64_t layer, int64_t count, const int64_t *keys,
                                const int32_t *slots, int64_t spared, int32_t *kept);

// Filling rows have arrived, or never will. Nothing has changed where it returns an error.
FLOE_API int floe_pool_settle(const floe_pool *pool, int64_t count, const int32_t *slots, int arrived);

// The slots of a transfer as 64-bit places, if rows and slots are in range and no slot is named twice.
FLOE_API int floe_landing(int64_t count, const int64_t *index, const int32_t *slots, int64_t rows, int64_t capacity,
                          int64_t *places);

// ---- memory

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

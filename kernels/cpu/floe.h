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
    FLOE_UNSUPPORTED = -5, // this processor or system cannot do it
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

// v = up_e · x for P calls, keeping neurons with |v| >= threshold, or NaN. Fills offsets (P + 1) and returns N; the
// neurons wait in the calling thread until it fetches them with floe_up_take. digits: 3 keeps float32's precision of x
// (about 22 bits), 2 is enough for 16-bit x (15 bits).
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

// y = x · Wᵀ for W of `width` rows: x (tokens, row->n) -> y (tokens, width), written whole.
FLOE_API int floe_linear(const float *x, int64_t tokens, const floe_vector *row, const uint8_t *q, const uint8_t *scale,
                         const uint8_t *zero, int64_t width, int digits, int threads, float *y);

// One expert over many tokens: y[t] = sum_n silu(gate_n · x_t) v_nt down_n over the neurons with |v_nt| >= threshold,
// v = up · x, and |silu(gate_n · x_t) v_nt| >= down_threshold, or NaN; y is (tokens, H), written whole. Pointers are to
// the expert's own weights. Returns how many (neuron, token) pairs were active, and in kept how many reached
// down_threshold too.
FLOE_API int64_t floe_expert_swiglu(const float *x, int64_t tokens, const floe_vector *up, const uint8_t *q,
                                    const uint8_t *scale, const uint8_t *zero, const floe_vector *gate,
                                    const floe_vector *down, const uint8_t *rows, int64_t neurons, int64_t row_bytes,
                                    float threshold, float down_threshold, int digits, int threads, float *y,
                                    int64_t *kept);

// out[i] = rows[index[i]]; pool[slot[i]] = records[i].
FLOE_API int floe_gather_rows(const uint8_t *rows, int64_t count, int64_t row_bytes, const int64_t *index,
                              int64_t wanted, int threads, uint8_t *out);
FLOE_API int floe_pool_scatter(uint8_t *pool, int64_t slots, int64_t row_bytes, const int64_t *slot, int64_t count,
                               int threads, const uint8_t *records);

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

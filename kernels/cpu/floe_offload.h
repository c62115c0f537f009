// The rest of the C interface: rows that move from RAM into a device's memory. See floe.h.
#ifndef FLOE_OFFLOAD_H
#define FLOE_OFFLOAD_H

#include "floe.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- what a step decides about rows (kernels/offload/placing.py)

// A step of a layer is two calls: floe_offload_start when the active neurons are known, floe_offload_finish when the
// device has been given the rows that are there. All lists are at addresses that the caller gives, once and for all if
// it likes: in memory that a device reads and writes as well, a graph of its own kernels fills floe_found's lists (ends
// from offsets + 1 on, behind a 0) and reads those of floe_places (READY between the calls, ARRIVED after the second).
// Nothing in them is allocated here, and nothing is read after the second call of a step.

// What a few tokens found active in a layer: `calls` calls, as in floe_active and floe_calls; halves are experts there.
// room: of neurons and values, of which offsets[calls] count. width: neurons of one of these experts. chosen, scores:
// (tokens, top_k) whole experts and the router's scores. values: up . x, numbers of `kind`. late: (calls) what |values|
// must reach for rows that are absent; NULL: all are waited for. heard: (tokens, experts) the router's scores of all
// experts; NULL: those of the chosen ones count.
typedef struct {
    int64_t layer, width, tokens, top_k, calls, room;
    const int64_t *offsets, *experts, *chosen;
    const int32_t *neurons;
    const float *weights, *scores;
    FLOE_OPTIONAL const void *values;
    FLOE_OPTIONAL const float *late, *heard;
    int64_t kind;
} floe_found;

// Seconds before a lane's first row, and for each: CPU and link. cpu_row is infinite where the CPU takes no share.
// memory_cpu, memory_copy: of RAM, which both read, for a row on each lane; 0 if it is no limit.
typedef struct {
    double cpu_start, cpu_row, copy_start, copy_row, memory_cpu, memory_copy;
} floe_lanes;

// Parts of the active neurons that are not done without: there; on their way; copied; computed by the CPU from RAM.
// ARRIVED, filled by floe_offload_finish: those that were on their way, or copied.
enum { FLOE_PART_READY, FLOE_PART_COMING, FLOE_PART_COPIED, FLOE_PART_BESIDE, FLOE_PART_ARRIVED, FLOE_PARTS };

// Filled: of each part offsets (calls + 1), positions among the active neurons and places (room): slots, or keys of
// absent rows. keys, slots (room): what is copied, each key once, and the slots of the first of them.
typedef struct {
    int64_t room;
    int64_t *offsets;
    int32_t *at, *places, *keys, *slots;
} floe_places;

// Keys to copy, and how many of them got a slot; calls that have active neurons, and those of which half the rows
// are present. transfer: the number of the one that brings the rows, 0 if there is none. Of floe_offload_finish: done,
// how many of the keys have arrived (before its first call -1); waited, seconds for rows on their way.
typedef struct {
    int64_t wanted, reserved, looked, hit, transfer, done;
    double waited;
} floe_placed;

// How a layer's rows get into the pool: over which link, from source (rows, row_bytes) to target (capacity, row_bytes),
// both NULL if bytes have no content. Prefetches of a call go in `pieces` pieces at most, of `piece` rows at least.
// pooled: whether floe_offload_collect and the other calls of that kind note what becomes of the rows, instead of
// floe_link_finished and floe_link_drop.
typedef struct {
    int64_t link, rows, capacity, piece, pieces, pooled;
    FLOE_OPTIONAL const uint8_t *source;
    FLOE_OPTIONAL uint8_t *target;
} floe_way;

// Places a step's rows, and sends for those that are copied if a way is given: visitors. No row of the step's experts
// is evicted until the next step.
FLOE_API int floe_offload_place(const floe_pool *pool, const floe_found *found, const floe_lanes *lanes,
                                FLOE_OPTIONAL const floe_way *way, const floe_places *places, floe_placed *placed);

// Notes the use of a step's neurons. places: what floe_offload_place has filled for them, if the caller has it.
FLOE_API int floe_offload_note(const floe_pool *pool, const floe_found *found, FLOE_OPTIONAL const floe_places *places);

// Slots for the absent ones of a guess's neurons, those of the calls that weigh most first, as many as may be fetched
// ahead, and FLOE_POOL_MOST at most; returns how many. Filled: guessed (total) keys of all; keys, slots (total) of the
// absent ones; runs (calls, 2), in their order: a call, and how many of the keys are its own. If a way is given, they
// are sent for, and sent (calls * pieces, 2) is filled: a transfer and how many keys end with it, then zeros.
FLOE_API int64_t floe_offload_ahead(const floe_pool *pool, const floe_found *guess, FLOE_OPTIONAL const floe_way *way,
                                    int32_t *guessed, int32_t *keys, int32_t *slots, int64_t *runs,
                                    FLOE_OPTIONAL int64_t *sent);

// How many of a step's neurons are among the guessed keys (count). marks: a layer's bytes, zero before and after.
FLOE_API int64_t floe_offload_right(const floe_pool *pool, const floe_found *found, int64_t count,
                                    const int32_t *guessed, uint8_t *marks);

// engine/offload/lane_rates.py: what rows take, corrected by what was seen: a new observation has the weight `step` in
// the mean and counts as `farthest` times the mean at most; a lane without work is believed `hope` times as fast.
// ram_bytes_s: of plain reads, infinite if not known; touched: times that a copied byte crosses RAM's bus.
typedef struct {
    double link_bytes_s, link_latency_s, cpu_bytes_s, cpu_latency_s, gpu_bytes_s, launch_s, ram_bytes_s, touched;
    double step, farthest, hope;
} floe_rates;

// Everything that a step works on. link: its handle. cpu_share: of the threads, which rows in RAM may use; 0 for
// none of the rows. spared: at most this small part of the pool is kept free for visitors. visit: the transfer of the
// last ones, 0 where it is known to have arrived.
// moved, busy: the link's, as last seen.
typedef struct {
    const floe_pool *pool;
    floe_rates *rates;
    int64_t link, row_bytes, spared, visit;
    double cpu_share;
    int64_t moved;
    double busy;
} floe_offload;

// The CPU's share of a step: `rows` in RAM as the preset divides them, hidden (tokens, H) in `found`'s kind, and of the
// calls tokens and products. Filled by floe_share_join: y (tokens, H), and kept (calls) as by floe_sparse_swiglu.
typedef struct {
    int64_t share;
    const floe_rows *rows;
    const void *hidden;
    const int64_t *tokens;
    FLOE_OPTIONAL const float *products;
    float *y;
    int64_t *kept;
    int32_t digits, threads;
} floe_beside;

// Begins a layer's turn, which the device has reached: notes what has arrived, drops what was fetched ahead for the
// layer and has not begun, and places the step by the rates. Sends for what is copied, and starts the CPU's share where
// `beside` is given.
FLOE_API int floe_offload_start(floe_offload *offload, const floe_found *found, const floe_way *way,
                                FLOE_OPTIONAL const floe_beside *beside, const floe_places *places,
                                floe_placed *placed);

// Ends it, once the device has been given the rows that were there: notes the use of its neurons, gives up rows for
// the next layer, waits for those on their way, and fills ARRIVED. marks: as in floe_offload_right. FLOE_MORE where the
// pool is too small for all at once: again, when the device has computed these. The share is not waited for.
FLOE_API int floe_offload_finish(floe_offload *offload, const floe_found *found, const floe_way *way, uint8_t *marks,
                                 FLOE_OPTIONAL const floe_stop *stop, const floe_places *places, floe_placed *placed);

// Requests the rows of these absent keys of a layer, as many as get a slot: behind everything urgent and in pieces, or
// urgently. Returns how many.
FLOE_API int64_t floe_offload_fetch(floe_offload *offload, int64_t layer, const floe_way *way, int64_t count,
                                    const int64_t *keys, int urgent, double score);

// Notes what has arrived in the pool. others: whether transfers elsewhere have ended since the last time.
FLOE_API int floe_offload_collect(floe_offload *offload, int others);

// Gives up what was fetched ahead for a layer (-1: for all) and has not begun.
FLOE_API int floe_offload_forget(floe_offload *offload, int64_t layer);

// Waits until everything on its way to the pool has arrived.
FLOE_API int floe_offload_await(floe_offload *offload);

// Rows in RAM that the CPU computes beside a device, without the caller: on the threads of the other operations. One
// step's at a time. seconds: from the start of a step's share to its end.
FLOE_API int64_t floe_share_open(void);
FLOE_API int floe_share_start(const floe_beside *beside, const floe_found *found, const floe_places *places);
FLOE_API int floe_share_join(const floe_beside *beside, double *seconds);
FLOE_API int floe_share_free(int64_t share);

// One token's step over memory that stays, whose ends take two records each. hidden: numbers of beside->y. late: filled
// by floe_step_end, whether there are rows in ARRIVED or a sum in beside->y, which is zero where there is no share.
typedef struct {
    const floe_found *found;
    const floe_way *way;
    const floe_beside *beside;
    const floe_places *places;
    floe_placed *placed;
    uint8_t *marks;
    int64_t hidden, late;
} floe_step;

// floe_offload_start, and floe_offload_finish with floe_share_join behind its last load.
FLOE_API int floe_step_start(floe_offload *offload, const floe_step *step);
FLOE_API int floe_step_end(floe_offload *offload, floe_step *step);

// What a layer will probably need, over memory that stays. guessed, keys, slots, runs, sent: as floe_offload_ahead
// fills them for `found`, with room for all. named (experts): those that are expected, each once or more often. asked,
// taken: how many of guessed and of keys the last guess has; asked is -1 where there is none. All others are counted up
// by floe_step_compare: guesses, neurons that were guessed, needed, and both, experts that were named and chosen, and
// rows that came and were not needed.
typedef struct {
    const floe_found *found;
    const floe_way *way;
    const int64_t *named;
    int32_t *guessed, *keys, *slots;
    int64_t *runs, *sent;
    int64_t experts, asked, taken, guesses, predicted, needed, right, experts_right, unused;
} floe_guess;

// floe_offload_ahead for what the device has found; nothing where a weight is not finite: the model has failed.
FLOE_API int floe_step_guess(floe_offload *offload, floe_guess *guess);

// Compares the guess with what its layer's step needs, once that has been started. After it there is none.
FLOE_API int floe_step_compare(const floe_offload *offload, const floe_step *step, floe_guess *guess);

// ---- virtual time

// engine/offload/virtual/virtual_clock.py: when four lanes will have ended their work, and the seconds of work each was
// given. counting: whether the host's own work counts, up to now by the calling thread's processor time `counted`.
// ticks: tests' values of that time, read one after the other from `tick` on; NULL: the system's.
typedef struct {
    double host, gpu, cpu, link, host_busy, gpu_busy, cpu_busy, link_busy, counted;
    FLOE_OPTIONAL const double *ticks;
    int64_t tick, tick_count;
    int32_t counting, reserved;
} floe_clock;

// ---- links

// NONE: rows are in their slots at once, and no time passes. VIRTUAL: likewise, but they count as landed when the clock
// says so. THROTTLED: by a thread, through buffers, slowly. CUDA: by a thread, to a GPU. DISK: read from files, by many
// requests at once.
enum { FLOE_LINK_NONE, FLOE_LINK_VIRTUAL, FLOE_LINK_THROTTLED, FLOE_LINK_CUDA, FLOE_LINK_DISK };

enum { FLOE_LINK_LANES = 4 };

// Tests hold chunks of a thread's link. begins: how many may begin; the others wait. fails_at: with this one, counted
// from 0, the link fails; -1 for none. waiting: how many floe_link_wait have begun to wait. chunks (capacity, 3):
// transfer, first and last row of each chunk, `count` of them so far.
typedef struct {
    int64_t begins, fails_at, waiting, capacity, count;
    int64_t *chunks;
} floe_link_gate;

// Addresses of the driver's functions, or of a test's stand-ins, by what they do: cuCtxSetCurrent (and the context that
// it is given), _PushCurrent, _PopCurrent, cuMemcpyHtoDAsync, cuGraphLaunch, cuEventRecord, _Query, _Synchronize,
// _ElapsedTime, cuStreamWaitEvent, cuPointerGetAttribute, cuGetErrorString.
typedef struct {
    int64_t set_context, context, push, pop, copy, launch, record, query, synchronize, elapsed, wait, address, text;
} floe_driver;

// Buffers of one chunk, `here` in pinned memory and `there` on the device: a head of 64-bit words, the number of rows,
// the address of the target and that of the source as the device sees it, one unused; then 32-bit numbers, slots
// (chunk) and rows of the source (chunk); then the rows themselves, unless they are read in place. stream, event,
// fence: CUDA's handles. scatter: the executable graph that puts the lane's rows into their slots.
typedef struct {
    uint8_t *here;
    int64_t there, stream, event, fence, scatter;
} floe_lane;

// Rows of row_bytes go `chunk` at a time, at most. pack_threads: threads that copy rows. rate in bytes per second,
// latency in seconds of one chunk: of VIRTUAL and THROTTLED. clock: of VIRTUAL. Of CUDA: lanes: LINK_LANES
// of them. head: bytes of a lane in front of its rows. compute: the stream that waits for rows. stalls (stall_count,
// 2): events with times, which measure how long it does. in_place: the device reads rows in pinned memory.
// Of DISK: extents (extent_count, 4) say which addresses of the sources are what part of a file: address, bytes, the
// file's descriptor, offset in it. readers: requests at once. gap: so many rows between two wanted ones are read with
// them. sector: what offsets, lengths and addresses of reads are multiples of.
typedef struct {
    int32_t kind, pack_threads;
    int64_t row_bytes, chunk;
    double rate, latency;
    FLOE_OPTIONAL floe_clock *clock;
    FLOE_OPTIONAL floe_link_gate *gate;
    FLOE_OPTIONAL const floe_driver *driver;
    FLOE_OPTIONAL const floe_lane *lanes;
    FLOE_OPTIONAL const int64_t *stalls;
    int64_t stall_count, head, compute;
    int32_t in_place, readers, gap, sector;
    FLOE_OPTIONAL const int64_t *extents;
    int64_t extent_count;
} floe_link_config;

// Returns a handle above 0. Each handle is used once; a stale one is FLOE_BAD_INDEX everywhere. What the configuration
// points to must stay until the link is freed.
FLOE_API int64_t floe_link_open(const floe_link_config *config);

// Rows `index` (count) of source (rows, row_bytes) to `slots` of target (capacity, row_bytes), each slot once. Urgent
// ones go first, in order, then the others by falling score. source and target: both NULL if bytes have no content,
// otherwise valid until the transfer has landed or was dropped. Returns the transfer's number, above 0.
FLOE_API int64_t floe_link_submit(int64_t link, FLOE_OPTIONAL const uint8_t *source, int64_t rows,
                                  FLOE_OPTIONAL uint8_t *target, int64_t capacity, int64_t count, const int32_t *index,
                                  const int32_t *slots, int urgent, double score, int64_t layer);

// Until computation that follows finds the rows in their slots; makes the transfer urgent. seconds: how long the host,
// or in virtual time the GPU, waited. FLOE_BAD_INDEX: it was never submitted, was dropped, or `finished` has named it.
FLOE_API int floe_link_wait(int64_t link, int64_t transfer, FLOE_OPTIONAL const floe_stop *stop, double *seconds);

// The transfers done since the last call, `most` of them at most; returns how many.
FLOE_API int64_t floe_link_finished(int64_t link, int64_t most, int64_t *transfers);

// Takes transfers of a layer (-1: of all) that are not urgent and have not begun out of the queue, `most` of them at
// most; returns how many.
FLOE_API int64_t floe_link_drop(int64_t link, int64_t layer, int64_t most, int64_t *transfers);

// Bytes that were submitted and have not landed.
FLOE_API int64_t floe_link_queued(int64_t link);

// Bytes that have landed, and seconds in which rows were on their way.
FLOE_API int floe_link_moved(int64_t link, int64_t *bytes, double *busy);

// Until everything submitted has landed.
FLOE_API int floe_link_drain(int64_t link);

// Chunks that begin from now on come after what the compute stream has been given so far: for a target that it used as
// other memory.
FLOE_API int floe_link_follow(int64_t link);

// Chunks on their way land, queued ones never will. Nothing moves afterwards, and nothing can be submitted.
FLOE_API int floe_link_close(int64_t link);

// Closes the link and makes the handle stale.
FLOE_API int floe_link_free(int64_t link);

// After FLOE_LINK_FAILED: why. Valid until the link is freed. NULL for a stale handle.
FLOE_API const char *floe_link_failure(int64_t link);

#ifdef __cplusplus
}
#endif
#endif

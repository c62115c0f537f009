// The rest of the C interface: rows that move from RAM into a device's memory. See floe.h.
#ifndef FLOE_OFFLOAD_H
#define FLOE_OFFLOAD_H

#include "floe.h"

#ifdef __cplusplus
extern "C" {
#endif

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

#ifdef __cplusplus
}
#endif
#endif

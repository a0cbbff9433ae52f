/* Recorded sequences of allocations: reading one, playing it, and what it takes to serve it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The file: lines `a ID BYTES` (allocates) and `f ID` (frees), decimal; IDs are given again once free. `# reserved
 * BYTES` says what another allocator takes for it; other lines that begin with # are ignored.
 * bench/peers/record_allocations.py writes them. */
#ifndef BENCH_ALLOC_TRACE_H
#define BENCH_ALLOC_TRACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gemini.h"

typedef struct alloc_event {
  uint64_t size_bytes; /* 0: a free */
  uint32_t id;
  uint32_t reserved;
} alloc_event_t;

typedef struct alloc_trace {
  alloc_event_t *events; /* owned */
  uint64_t count, id_count;
  uint64_t live_peak_bytes; /* sizes as asked for */
  uint64_t reserved_bytes;  /* by the other allocator; 0: not said */
} alloc_trace_t;

/* Sizes are divided by scale, and are at least 1: the simulated device has real memory. False, with why_out filled, when
 * the file cannot be read or is no trace. */
bool alloc_trace_load(const char *path, uint64_t scale, alloc_trace_t *trace_out, char *why_out, size_t why_bytes);
void alloc_trace_free(alloc_trace_t *trace);

typedef void *(*alloc_get_fn)(void *user, uint64_t size_bytes);
typedef void (*alloc_put_fn)(void *user, void *ptr, uint64_t size_bytes);
/* Plays it whole; what is live at its end is freed. False: get returned NULL, or there is no memory for records. */
bool alloc_trace_play(const alloc_trace_t *trace, alloc_get_fn get, alloc_put_fn put, void *user);

/* Plays it on a manager of that configuration, opened and closed here, by the allocator for PyTorch. held_out: most bytes
 * that the device gave for it, whole chunks. The status of what failed. */
gemini_status_t alloc_trace_serve(const alloc_trace_t *trace, const gemini_config_t *config, uint64_t *held_out);
/* The smallest device budget in which that works, to a chunk; 0: there is none below four times what is live. */
uint64_t alloc_trace_least(const alloc_trace_t *trace, const gemini_config_t *config);

#endif

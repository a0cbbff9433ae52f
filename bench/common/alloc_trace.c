/* Recorded sequences of allocations (see alloc_trace.h). SPDX-License-Identifier: Apache-2.0 */
#include "alloc_trace.h"
#include "gemini/hook.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IDS_MAX = 1 << 20 };

static bool read_events(FILE *file, uint64_t scale, alloc_trace_t *t, uint64_t *line_out) {
  char line[256];
  uint64_t capacity = 0, live = 0, *sizes = calloc(IDS_MAX, sizeof *sizes);
  bool fine = sizes != NULL;
  for (*line_out = 1; fine && fgets(line, sizeof line, file); (*line_out)++) {
    if (line[0] == '#') {
      if (sscanf(line, "# reserved %" SCNu64, &t->reserved_bytes) == 1) t->reserved_bytes /= scale;
      while (!strchr(line, '\n') && fgets(line, sizeof line, file)) continue; /* comments may be long */
      continue;
    }
    alloc_event_t e = { 0 };
    char end;
    if (line[0] == 'a') fine = sscanf(line, "a %" SCNu32 " %" SCNu64 " %c", &e.id, &e.size_bytes, &end) == 2;
    else fine = sscanf(line, "f %" SCNu32 " %c", &e.id, &end) == 1;
    fine = fine && e.id < IDS_MAX && (line[0] == 'a' ? e.size_bytes && !sizes[e.id] : sizes[e.id] != 0);
    if (!fine) break;
    if (e.size_bytes) e.size_bytes = e.size_bytes > scale ? e.size_bytes / scale : 1;
    live += e.size_bytes - (line[0] == 'a' ? 0 : sizes[e.id]);
    sizes[e.id] = e.size_bytes;
    if (live > t->live_peak_bytes) t->live_peak_bytes = live;
    if (e.id >= t->id_count) t->id_count = e.id + 1;
    if (t->count == capacity) {
      capacity = capacity ? capacity * 2 : 4096;
      alloc_event_t *grown = realloc(t->events, capacity * sizeof *grown);
      fine = grown != NULL;
      if (!fine) break;
      t->events = grown;
    }
    t->events[t->count++] = e;
  }
  free(sizes);
  return fine && t->count;
}

bool alloc_trace_load(const char *path, uint64_t scale, alloc_trace_t *trace_out, char *why_out, size_t why_bytes) {
  *trace_out = (alloc_trace_t){ 0 };
  FILE *file = fopen(path, "r");
  if (!file) {
    snprintf(why_out, why_bytes, "%s: %s", path, strerror(errno));
    return false;
  }
  uint64_t line;
  bool fine = read_events(file, scale, trace_out, &line);
  fclose(file);
  if (fine) return true;
  snprintf(why_out, why_bytes, "%s:%" PRIu64 ": no trace of allocations", path, line);
  alloc_trace_free(trace_out);
  return false;
}

void alloc_trace_free(alloc_trace_t *trace) {
  free(trace->events);
  *trace = (alloc_trace_t){ 0 };
}

bool alloc_trace_play(const alloc_trace_t *trace, alloc_get_fn get, alloc_put_fn put, void *user) {
  struct {
    void *ptr;
    uint64_t size_bytes;
  } *blocks = calloc(trace->id_count, sizeof *blocks);
  bool fine = blocks != NULL;
  for (uint64_t i = 0; fine && i < trace->count; i++) {
    const alloc_event_t *e = &trace->events[i];
    if (e->size_bytes) {
      blocks[e->id].ptr = get(user, e->size_bytes);
      blocks[e->id].size_bytes = e->size_bytes;
      fine = blocks[e->id].ptr != NULL;
    } else {
      put(user, blocks[e->id].ptr, blocks[e->id].size_bytes);
      blocks[e->id].ptr = NULL;
    }
  }
  for (uint64_t i = 0; blocks && i < trace->id_count; i++)
    if (blocks[i].ptr) put(user, blocks[i].ptr, blocks[i].size_bytes);
  free(blocks);
  return fine;
}

typedef struct hook {
  int device;
  void *stream;
} hook_t;
static void *get(void *user, uint64_t size_bytes) {
  const hook_t *hook = user;
  return gemini_torch_malloc((ptrdiff_t)size_bytes, hook->device, hook->stream);
}
static void put(void *user, void *ptr, uint64_t size_bytes) {
  const hook_t *hook = user;
  gemini_torch_free(ptr, (ptrdiff_t)size_bytes, hook->device, hook->stream);
}

gemini_status_t alloc_trace_serve(const alloc_trace_t *trace, const gemini_config_t *config, uint64_t *held_out) {
  gemini_manager_t mgr;
  gemini_stream_t stream = 0; /* on a GPU: its default stream */
  gemini_tier_stats_t stats = GEMINI_TIER_STATS_INIT;
  gemini_status_t status = gemini_manager_open(config, &mgr);
  if (status) return status;
  if (config->device == GEMINI_DEVICE_SIMULATED) status = gemini_stream_create(mgr, &stream);
  if (!status) status = gemini_hook_set(mgr, 0);
  hook_t hook = { (int)config->device_ordinal, (void *)(uintptr_t)stream };
  if (!status && !alloc_trace_play(trace, get, put, &hook)) status = GEMINI_ERR_OOM_DEVICE;
  gemini_status_t told = gemini_tier_stats(mgr, GEMINI_TIER_DEVICE, &stats);
  if (!status) status = told;
  if (!status) *held_out = stats.peak_bytes;
  told = gemini_manager_close(mgr);
  return status ? status : told;
}

uint64_t alloc_trace_least(const alloc_trace_t *trace, const gemini_config_t *config) {
  gemini_config_t c = *config;
  uint64_t chunk = c.chunk_bytes, low = trace->live_peak_bytes / chunk, high = low * 4 + 4, held;
  c.device_margin_bytes = 0;
  c.device_bytes = high * chunk;
  if (alloc_trace_serve(trace, &c, &held)) return 0;
  while (high - low > 1) { /* it works in high chunks; low are not known to be enough */
    uint64_t middle = low + (high - low) / 2;
    c.device_bytes = middle * chunk;
    if (alloc_trace_serve(trace, &c, &held)) low = middle;
    else high = middle;
  }
  return high * chunk;
}

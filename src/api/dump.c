/* Writes the manager's state as text for people, in particular during a hang: gemini_manager_dump().
 * SPDX-License-Identifier: Apache-2.0
 *
 * The dump must not wait for the manager's lock. Statistics and streams are read from atomic words. Records of chunks
 * are read if the lock is free, or while its holder itself waits, when the records are consistent (gmi_reading_begin()
 * of core/watch.h); otherwise the dump names the function and the thread that is changing them. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "api/text.h"
#include "base/names.h"
#include "chunk/arena.h"
#include "core/manager.h"

enum { SHOWN = 20 }; /* acquired tensors listed at most */

static const char *const tier_names[GEMINI_TIER_COUNT] = { "device", "host", "files" };

static void write_figures(gmi_manager_t *m, FILE *file, const gemini_stats_t *s) {
  for (uint32_t t = 0; t < GEMINI_TIER_COUNT; t++) {
    gemini_tier_stats_t tier;
    gmi_tier_stats_read(m, t, &tier);
    if (tier.budget_bytes)
      fprintf(file, "%s: %" PRIu64 " of %" PRIu64 " bytes used, at most %" PRIu64 "\n", tier_names[t], tier.used_bytes,
              tier.budget_bytes, tier.peak_bytes);
  }
  fprintf(file, "allocated: %" PRIu64 " bytes on the device, %" PRIu64 " on the host\n", s->nonmodel_bytes,
          s->host_alloc_bytes);
  fprintf(file, "tensors: %" PRIu64 " bytes, in chunks of %" PRIu64 "\n", s->model_bytes, s->chunk_bytes);
  fprintf(file, "iterations: %" PRIu64 " ended, %" PRIu64 " of them planned; %" PRIu64 " departures\n", s->iterations,
          s->planned_iterations, s->departures);
  fprintf(file, "updates: %" PRIu64 " parts pending\n", s->pending_updates);
}

static const char *mode_name(uint32_t mode) {
  return mode == GEMINI_READ ? "read" : mode == GEMINI_WRITE ? "written" : "read and written";
}

static void write_acquired(gmi_manager_t *m, FILE *file) {
  uint32_t shown = 0;
  uint64_t more = 0;
  for (uint32_t i = 0; i < m->tensors.high; i++) {
    gmi_tensor_t *t = &m->tensors.at[i];
    uint64_t word = atomic_load(&t->word);
    if (!gmi_tensor_alive(t) || !(word & GMI_TENSOR_USERS)) continue;
    if (shown++ >= SHOWN) {
      more++;
      continue;
    }
    fputs("acquired: tensor ", file);
    gmi_name_print(file, gmi_tensor_base(m, t)->name);
    fputs(" of arena ", file);
    gmi_name_print(file, gmi_arena_at(m, t->arena)->name);
    fprintf(file, ", %" PRIu64 " times", gmi_tensor_users(word));
    for (uint32_t mode = GEMINI_READ; mode <= GEMINI_READ_WRITE; mode++) {
      uint64_t users = gmi_tensor_field_users(word, mode);
      if (users) fprintf(file, ", %" PRIu64 " of them as a whole on the device, %s", users, mode_name(mode));
    }
    fputc('\n', file);
  }
  if (more) fprintf(file, "acquired: %" PRIu64 " more tensors\n", more);
}

/* Lists the streams with work that has not ended. The acquire load of recorded pairs with the stores of fence_now()
 * (core/streams.c). */
static void write_streams(gmi_manager_t *m, FILE *file) {
  for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++) {
    const char *job = gmi_stream_job(m, i);
    if (!atomic_load(&m->streams[i].life) ||
        m->device.ops->stream.reached(m->device.self, i,
                                      atomic_load_explicit(&m->streams[i].recorded, memory_order_acquire)))
      continue;
    fprintf(file, "stream %u: has work that has not ended%s%s\n", i, job ? "; it " : "", job ? job : "");
  }
}

static void write_records(gmi_manager_t *m, FILE *file) {
  const char *op = m->trace.advice->op_name(m);
  uint64_t resident = 0, acquired = 0, dirty = 0, on_host = 0, in_files = 0, empty = 0;
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    for (uint32_t k = 0; a && a->chunks && k < atomic_load(&a->chunk_count); k++) {
      const gmi_chunk_t *c = &a->chunks[k];
      resident += gmi_chunk_is_resident(c);
      dirty += gmi_chunk_has_only(c, GMI_VALID_DEVICE);
      acquired += gmi_chunk_in_use(c);
      on_host += gmi_chunk_has(c, GMI_VALID_HOST) != 0;
      in_files += gmi_chunk_has(c, GMI_VALID_FILE) != 0;
      empty += gmi_chunk_has_only(c, GMI_VALID_ZERO);
    }
  }
  fputs("operator: ", file);
  gmi_name_print(file, op ? op : "none");
  fprintf(file, "; %s iteration is open\n", m->bracket.iteration_open ? "an" : "no");
  fprintf(file,
          "chunks: %" PRIu64 " on the device, of %" PRIu64 " of these the only copy; %" PRIu64 " on the host; %" PRIu64
          " in files; %" PRIu64 " without bytes; %" PRIu64 " acquired, or in use by the library\n",
          resident, dirty, on_host, in_files, empty, acquired);
  fprintf(file, "transfers: %u to and from files under way, %u of them writes\n", m->io.count, m->io.writes);
  if (m->failure.status) fprintf(file, "failed: %s\n", m->failure.message);
  write_acquired(m, file);
}

static void dump(gmi_manager_t *m, FILE *file, void *user) {
  (void)user;
  fprintf(file, "manager %#llx on device %s\n", (unsigned long long)m->identity.id, m->device.ops->name);
  gemini_stats_t stats;
  gmi_stats_read(m, &stats);
  write_figures(m, file, &stats);
  write_streams(m, file);
  gmi_reading_t reading = gmi_reading_begin(m);
  if (reading == GMI_READING_NOT) {
    fputs("chunks: cannot be read now, as ", file);
    gmi_watch_write_holder(m, file);
    fputs(" is changing them\n", file);
  } else {
    write_records(m, file);
  }
  gmi_watch_write_waits(m, reading, file);
  gmi_reading_end(m, reading);
}

gemini_status_t gmi_text_out(gmi_manager_t *m, void (*write)(gmi_manager_t *m, FILE *file, void *user), void *user,
                             uint64_t size_bytes, char *text_out, uint64_t *length_out) {
  if (!text_out && size_bytes)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "text_out is NULL but size_bytes is %llu", (unsigned long long)size_bytes);
  char *text = NULL;
  size_t length = 0;
  FILE *file = open_memstream(&text, &length);
  if (!file) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the text");
  write(m, file, user);
  if (fclose(file)) {
    free(text);
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the text");
  }
  if (size_bytes) snprintf(text_out, size_bytes, "%s", text);
  if (length_out) *length_out = length;
  free(text);
  return GEMINI_OK;
}
gemini_status_t gemini_manager_dump(gemini_manager_t mgr, uint64_t size_bytes, char *text_out, uint64_t *length_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? gmi_text_out(m, dump, NULL, size_bytes, text_out, length_out) : GEMINI_ERR_HANDLE);
}

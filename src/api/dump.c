/* Writes the manager's state as text for people, in particular during a hang: gemini_manager_dump(), and the watchdog.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The dump must not wait for the manager's lock. Statistics, streams and which rank this is are read from atomic words.
 * Records of chunks and groups are read if the lock is free, or while its holder itself waits, when the records are
 * consistent (gmi_reading_begin() of core/watch.h); otherwise the dump names the function and the thread that holds the
 * lock. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "api/text.h"
#include "base/names.h"
#include "chunk/arena.h"
#include "chunk/group.h"
#include "chunk/shard.h"
#include "core/manager.h"
#include "core/streams.h"

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

/* ---- groups */
/* For each group, who this process is in it. No lock. */
static void write_ranks(gmi_manager_t *m, FILE *file) {
  for (uint32_t i = 0; i < GMI_GROUPS; i++) {
    const uint64_t who = atomic_load(&m->groups.who[i]);
    const uint32_t rank = who & 0xFFFF, ranks = who >> 16 & 0xFFFF, shard = who >> 32 & 0xFFFF;
    if (who)
      fprintf(file, "group %u: rank %u of %u, in %u replica%s of %u ranks\n", i, rank, ranks, ranks / shard,
              ranks == shard ? "" : "s", shard);
  }
}

static void write_queued(gmi_manager_t *m, FILE *file, uint32_t group, const char *what, const gmi_queued_t *q) {
  const uint64_t begin = q->calls < GMI_QUEUED ? 0 : q->calls - GMI_QUEUED;
  uint64_t first = q->calls, chunks = 0; /* they end in the order of the calls */
  while (first > begin && !gmi_fence_reached(m, q->at[(first - 1) % GMI_QUEUED].end))
    chunks += q->at[--first % GMI_QUEUED].chunks;
  fprintf(file, "group %u: %s of %" PRIu64 " chunks queued so far", group, what, q->chunks);
  if (first == q->calls) fputs(", all have ended\n", file);
  else {
    fprintf(file, "; %s%" PRIu64 " calls, of %" PRIu64 " chunks, have not ended, the first for ",
            first == begin && begin ? "at least " : "", q->calls - first, chunks);
    gmi_name_print(file, q->at[first % GMI_QUEUED].label);
    fputc('\n', file);
  }
}

static void write_slices(gmi_manager_t *m, FILE *file, const gmi_arena_t *a) {
  const gmi_arena_t *slices = gmi_arena_slices(m, a);
  uint64_t device = 0, host = 0, files = 0, count = 0;
  if (slices->store != slices->index) {
    fputs("; this rank's slices lie in those of arena ", file);
    gmi_name_print(file, gmi_arena_at(m, slices->store)->name);
    return;
  }
  for (; slices->chunks && count < atomic_load(&slices->chunk_count); count++) {
    const gmi_chunk_t *c = &slices->chunks[count];
    device += gmi_chunk_is_resident(c);
    host += gmi_chunk_has(c, GMI_VALID_HOST) != 0;
    files += gmi_chunk_has(c, GMI_VALID_FILE) != 0;
  }
  fprintf(file,
          "; this rank's slices are %" PRIu64 " chunks, %" PRIu64 " on the device, %" PRIu64 " on the host, %" PRIu64
          " in files",
          count, device, host, files);
}

static void write_sharded(gmi_manager_t *m, FILE *file, gmi_arena_t *a) {
  uint64_t gathered = 0, coming = 0, acquired = 0;
  const uint32_t count = a->chunks ? atomic_load(&a->chunk_count) : 0;
  for (uint32_t k = 0; k < count; k++) {
    const gmi_chunk_t *c = &a->chunks[k];
    if (!gmi_chunk_is_resident(c)) continue;
    gathered++;
    coming += !gmi_fence_reached(m, gmi_chunk_arrive(c));
    acquired += gmi_chunk_device_users(c) != 0;
  }
  fprintf(file, "group %u: arena ", a->shard.group);
  gmi_name_print(file, a->name);
  if (gmi_arena_is_gradients(a))
    fprintf(file, ": of %u chunks of gradients %u added %s%s, %" PRIu64 " on the device, %" PRIu64 " acquired", count,
            a->shard.reduced, gmi_arena_has_sums(a) ? "in this round" : "since the last update",
            a->shard.due ? ", which every rank adds" : "", gathered, acquired);
  else if (!gmi_arena_is_sliced_only(a))
    fprintf(file, ": of %u chunks %" PRIu64 " gathered, of these %" PRIu64 " have not arrived, %" PRIu64 " acquired",
            count, gathered, coming, acquired);
  else fputs(": in slices only", file);
  write_slices(m, file, a);
  fputc('\n', file);
}

static void write_groups(gmi_manager_t *m, FILE *file) {
  for (uint32_t i = 0; i < GMI_GROUPS; i++) {
    const gmi_group_t *g = gmi_group_at(m, i);
    if (!g) continue;
    write_queued(m, file, i, "gathers", &g->latest.gathers);
    if (g->held.count)
      fprintf(file, "group %u: gathers of %u chunks are held back, to be queued together\n", i, g->held.count);
    write_queued(m, file, i, "sums", &g->latest.sums);
    for (uint32_t k = 0; k < GMI_ARENAS; k++) {
      gmi_arena_t *a = gmi_arena_at(m, k);
      if (a && gmi_arena_is_sharded(a) && a->shard.group == i) write_sharded(m, file, a);
    }
  }
}

void gmi_dump_write(gmi_manager_t *m, FILE *file) {
  fprintf(file, "manager %#llx on device %s\n", (unsigned long long)m->identity.id, m->device.ops->name);
  gemini_stats_t stats;
  gmi_stats_read(m, &stats);
  write_figures(m, file, &stats);
  write_streams(m, file);
  write_ranks(m, file);
  gmi_reading_t reading = gmi_reading_begin(m);
  if (reading == GMI_READING_NOT) {
    fputs("chunks, acquired tensors and groups: cannot be told now, as ", file);
    gmi_watch_write_holder(m, file);
    fputs(" holds the manager's lock\n", file);
  } else {
    write_records(m, file);
    write_groups(m, file);
  }
  gmi_watch_write_waits(m, reading, file);
  gmi_reading_end(m, reading);
}
static void dump(gmi_manager_t *m, FILE *file, void *user) {
  (void)user;
  gmi_dump_write(m, file);
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

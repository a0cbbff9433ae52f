/* Traces in memory (growing arrays) and in files. docs/trace.md describes the format. Called by tracer.c and record.c.
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/file_limit.h"
#include "base/names.h"
#include "chunk/arena.h"
#include "chunk/cut.h"
#include "tracer/tracer.h"

gmi_trace_op_t *gmi_trace_add_op(gmi_trace_t *t) {
  gmi_trace_op_t *ops = gmi_array_room(t->ops, t->op_count, &t->op_capacity, sizeof *ops);
  if (!ops) return NULL;
  t->ops = ops;
  ops[t->op_count] = (gmi_trace_op_t){ .use_first = t->use_count };
  return &ops[t->op_count++];
}
gmi_trace_use_t *gmi_trace_add_use(gmi_trace_t *t) {
  gmi_trace_use_t *uses = gmi_array_room(t->uses, t->use_count, &t->use_capacity, sizeof *uses);
  if (!uses) return NULL;
  t->uses = uses;
  t->ops[t->op_count - 1].use_count++;
  return &uses[t->use_count++];
}
gmi_trace_update_t *gmi_trace_add_update(gmi_trace_t *t) {
  gmi_trace_update_t *updates = gmi_array_room(t->updates, t->update_count, &t->update_capacity, sizeof *updates);
  if (!updates) return NULL;
  t->updates = updates;
  memset(&updates[t->update_count], 0, sizeof *updates);
  return &updates[t->update_count++];
}
gmi_trace_collective_t *gmi_trace_add_gather(gmi_trace_t *t) {
  gmi_trace_collective_t *gathers = gmi_array_room(t->gathers, t->gather_count, &t->gather_capacity, sizeof *gathers);
  if (!gathers) return NULL;
  t->gathers = gathers;
  return &gathers[t->gather_count++];
}
gmi_trace_collective_t *gmi_trace_add_sum(gmi_trace_t *t) {
  gmi_trace_collective_t *sums = gmi_array_room(t->sums, t->sum_count, &t->sum_capacity, sizeof *sums);
  if (!sums) return NULL;
  t->sums = sums;
  return &sums[t->sum_count++];
}
gmi_trace_chosen_t *gmi_trace_add_chosen(gmi_trace_t *t) {
  gmi_trace_chosen_t *uses = gmi_array_room(t->chosen.uses, t->chosen.count, &t->chosen.capacity, sizeof *uses);
  if (!uses) return NULL;
  t->chosen.uses = uses;
  return &uses[t->chosen.count++];
}
void gmi_trace_clear(gmi_trace_t *t) {
  for (uint32_t i = 0; i < t->op_count; i++)
    if (t->ops[i].name) gmi_op_name_drop(t->names, t->ops[i].name);
  t->op_count = t->use_count = t->update_count = t->gather_count = t->sum_count = t->chosen.count = 0;
}
void gmi_trace_free(gmi_trace_t *t) {
  gmi_trace_clear(t);
  free(t->ops);
  free(t->uses);
  free(t->updates);
  free(t->gathers);
  free(t->sums);
  free(t->ahead_ops);
  free(t->chosen.uses);
  memset(t, 0, sizeof *t);
}

/* Writes the trace. gmi_file_limit_begin() turns the signal of a file that exceeds RLIMIT_FSIZE into an error. */
static gemini_status_t trace_write(gmi_manager_t *m, const gmi_trace_t *t, const char *path) {
  FILE *file = fopen(path, "we");
  if (!file) return gmi_fail(GEMINI_ERR_IO, errno, "trace %s: could not open it: %s", path, strerror(errno));
  gmi_file_limit_t limit = gmi_file_limit_begin();
  fprintf(file, "gemini-trace 1\n");
  fprintf(file, "budget %" PRIu64 " %" PRIu64 "\n", gmi_chunk_bytes(m),
          m->config.device_bytes - m->config.device_margin_bytes);
  fprintf(file, "rates %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", t->link_bytes_per_s[0],
          t->link_bytes_per_s[1], t->host_update_ps, t->device_update_ps);
  if (t->pass_ps[0] && t->pass_ps[1])
    fprintf(file, "pass_rates %" PRIu64 " %" PRIu64 "\n", t->pass_ps[0], t->pass_ps[1]);
  fprintf(file, "files %" PRIu64 " %" PRIu64 "\n", t->file_bytes_per_s[0], t->file_bytes_per_s[1]);
  fprintf(file, "outside %" PRIu64 "\n", t->outside_ns);
  gmi_arenas_write(m, file, true);
  for (uint32_t i = 0, u = 0; i <= t->op_count; i++) {
    for (; u < t->update_count && t->updates[u].after_op == i; u++) {
      const gmi_trace_update_t *update = &t->updates[u];
      fprintf(file, "update %" PRIu64 " %" PRIu64, update->first_element, update->element_count);
      for (uint32_t k = 0; k < update->arena_count; k++) fprintf(file, " %u:%u", update->arenas[k], update->modes[k]);
      fputc('\n', file);
      if (update->passes) fprintf(file, "in_passes\n");
    }
    if (i == t->op_count) break;
    const gmi_trace_op_t *op = &t->ops[i];
    fprintf(file, "op %u %" PRIu64 " %" PRIu64 " %" PRIu64 " ", op->phase, op->compute_ns, op->nonmodel_peak,
            (op->heap_pages + op->gathered) * gmi_frame_bytes(m));
    gmi_name_write(file, op->name);
    fputc('\n', file);
    for (uint32_t s = op->use_first; s < op->use_first + op->use_count; s++)
      fprintf(file, "use %u %" PRIu64 " %" PRIu64 " %u\n", t->uses[s].arena, t->uses[s].offset, t->uses[s].size,
              t->uses[s].mode);
  }
  fprintf(file, "end\n");
  bool bad = ferror(file);
  bad |= fclose(file) != 0;
  gmi_file_limit_end(&limit);
  if (bad) return gmi_fail(gmi_file_status(errno), errno, "trace %s: could not write it: %s", path, strerror(errno));
  return GEMINI_OK;
}
gemini_status_t gmi_trace_write(gmi_manager_t *m, const gmi_trace_t *t, const char *path) {
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_TEXT, 0);
  gemini_status_t status = trace_write(m, t, path);
  gmi_wait_end(m, &wait);
  return status;
}

/* Heap pages are counted in this unit, which divides every chunk size, until a whole file has been accepted: reading
 * may come before the choice of the chunk size, which a file that is refused must not trigger. */
#define PAGE_UNIT UINT64_C(65536)

/* State of a reader. */
typedef struct {
  gmi_manager_t *m;
  gmi_trace_t *trace;
  uint32_t arena_of[GMI_ARENAS]; /* maps the file's arena numbers to the manager's; GMI_NONE: not seen */
  bool ended;
  bool lost; /* memory for a line ran out */
} reader_t;

static const char *no_memory(reader_t *r) {
  r->lost = true;
  return "no memory for this line";
}

/* Adds one line to the trace. Returns NULL, or what is wrong with the line. Every number is checked against its
 * range before it is used: files may come from anywhere. */
static const char *read_line(reader_t *r, const char *line) {
  const uint64_t most = UINT64_C(1) << 50;
  gmi_manager_t *m = r->m;
  char name[256];
  uint64_t v[6], size;
  const char *at = line;
  if (r->ended) return "text after the end";
  if (!strcmp(line, "end")) {
    r->ended = true;
    return NULL;
  }
  if (gmi_word_at(&at, "budget")) {
    if (!gmi_numbers_at(&at, 0, UINT64_MAX, 2, v) || v[0] < 65536 || v[0] > (UINT64_C(1) << 30) || (v[0] & (v[0] - 1)))
      return "malformed budget";
    r->trace->chunk_bytes = v[0];
    if (m->trace.plans_only && !m->config.chunk_bytes) m->config.chunk_bytes = v[0];
    return NULL;
  }
  if (gmi_word_at(&at, "outside")) {
    if (!gmi_number_at(&at, 0, UINT64_C(1) << 56, &r->trace->outside_ns)) return "malformed outside";
    return NULL;
  }
  if (gmi_word_at(&at, "rates")) {
    if (!gmi_numbers_at(&at, 0, most, 4, v)) return "malformed rates";
    r->trace->link_bytes_per_s[0] = v[0];
    r->trace->link_bytes_per_s[1] = v[1];
    r->trace->host_update_ps = v[2];
    r->trace->device_update_ps = v[3];
    return NULL;
  }
  if (gmi_word_at(&at, "pass_rates")) {
    if (!gmi_numbers_at(&at, 0, most, 2, r->trace->pass_ps)) return "malformed pass_rates";
    return NULL;
  }
  if (!strcmp(line, "in_passes")) {
    if (!r->trace->update_count) return "in_passes without an update";
    r->trace->updates[r->trace->update_count - 1].passes = true;
    return NULL;
  }
  if (gmi_word_at(&at, "files")) {
    if (!gmi_numbers_at(&at, 0, most, 2, r->trace->file_bytes_per_s)) return "malformed files";
    return NULL;
  }
  if (gmi_word_at(&at, "arena"))
    return (m->trace.plans_only ? gmi_arena_make : gmi_arena_read)(m, at, r->arena_of, name);
  if (gmi_word_at(&at, "zeroed")) {
    if (!gmi_number_at(&at, 0, GMI_ARENAS - 1, v) || r->arena_of[v[0]] == GMI_NONE) return "malformed zeroed";
    r->trace->zeroed[r->arena_of[v[0]]] = true;
    return NULL;
  }
  if (gmi_word_at(&at, "op")) { /* phase, compute_ns, nonmodel_peak, heap bytes */
    if (!gmi_number_at(&at, ' ', GEMINI_PHASE_UPDATE, &v[0]) || !gmi_number_at(&at, ' ', UINT64_C(1) << 62, &v[1]) ||
        !gmi_numbers_at(&at, ' ', UINT64_C(1) << 46, 2, &v[2]) || !gmi_name_read(at, name, 128))
      return "malformed op";
    gmi_trace_op_t *op = gmi_trace_add_op(r->trace);
    if (op) op->name = gmi_op_name_take(r->trace->names, name);
    if (!op || !op->name) return no_memory(r);
    op->phase = (uint32_t)v[0];
    op->compute_ns = v[1];
    gmi_times_add(&op->times, v[1]);
    op->nonmodel_peak = op->nonmodel_least = v[2];
    op->heap_pages = (uint32_t)((v[3] + PAGE_UNIT - 1) / PAGE_UNIT);
    return NULL;
  }
  if (gmi_word_at(&at, "use")) { /* arena, offset, size, mode */
    if (!gmi_number_at(&at, ' ', GMI_ARENAS - 1, &v[0]) || !gmi_numbers_at(&at, ' ', UINT64_MAX, 2, &v[1]) ||
        !gmi_number_at(&at, 0, 3, &v[3]) || !v[3] || !r->trace->op_count)
      return "malformed use";
    gmi_arena_t *arena = r->arena_of[v[0]] == GMI_NONE ? NULL : gmi_arena_at(m, r->arena_of[v[0]]);
    size = arena ? atomic_load(&arena->size) : 0;
    if (!arena || arena->store != arena->index || !v[2] || v[1] > size || v[2] > size - v[1])
      return "use outside its arena";
    gmi_trace_use_t *use = gmi_trace_add_use(r->trace);
    if (!use) return no_memory(r);
    *use = (gmi_trace_use_t){ arena->index, (uint32_t)v[3], v[1], v[2] };
    return NULL;
  }
  if (gmi_word_at(&at, "update")) { /* first, count, then arenas and modes */
    if (!gmi_numbers_at(&at, ' ', UINT64_MAX, 2, v) || !r->trace->op_count) return "malformed update";
    gmi_trace_update_t update = { .after_op = r->trace->op_count, .first_element = v[0], .element_count = v[1] };
    for (bool last = false; !last; update.arena_count++) {
      last = !strchr(at, ' ');
      if (update.arena_count == GMI_UPDATE_ARENAS || !gmi_number_at(&at, ':', GMI_ARENAS - 1, &v[2]) ||
          !gmi_number_at(&at, last ? 0 : ' ', 3, &v[3]) || !v[3])
        return "malformed update";
      gmi_arena_t *arena = r->arena_of[v[2]] == GMI_NONE ? NULL : gmi_arena_at(m, r->arena_of[v[2]]);
      uint64_t elements = arena ? atomic_load(&arena->size) / arena->element_bytes : 0;
      if (!arena || !v[1] || v[0] > elements || v[1] > elements - v[0]) return "update outside its arenas";
      update.arenas[update.arena_count] = arena->index;
      update.modes[update.arena_count] = (uint32_t)v[3];
    }
    gmi_trace_update_t *record = gmi_trace_add_update(r->trace);
    if (!record) return no_memory(r);
    *record = update;
    return NULL;
  }
  return "not a line of a trace";
}

/* Opening and reading are separate waits (core/watch.h), because the tracer's records change between them and a dump
 * reads records only during a wait. */
static FILE *open_trace(gmi_manager_t *m, const char *path) {
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_TEXT, 0);
  FILE *file = fopen(path, "re");
  gmi_wait_end(m, &wait);
  return file;
}
static bool next_line(gmi_manager_t *m, FILE *file, char *line, int size) {
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_TEXT, 0);
  bool got = fgets(line, size, file) != NULL;
  gmi_wait_end(m, &wait);
  return got;
}

/* For a forecast, tiers and arenas may be as large as one likes, but not their records; and a device without room for a
 * chunk gets it, as there are no tables of nothing. */
static gemini_status_t check_chunks(gmi_manager_t *m) {
  const uint64_t chunk_bytes = m->config.chunk_bytes ? m->config.chunk_bytes : PAGE_UNIT;
  if (m->config.device_bytes - m->config.device_margin_bytes < chunk_bytes)
    m->config.device_bytes = m->config.device_margin_bytes + chunk_bytes;
  const struct {
    const char *name;
    uint64_t value;
  } sizes[] = { { "device_bytes", m->config.device_bytes },
                { "host_bytes", m->config.host_bytes },
                { "file_bytes", m->config.file_bytes },
                { "the size of all arenas", m->stats.model_bytes } };
  for (int i = 0; i < 4; i++)
    if (sizes[i].value / chunk_bytes > UINT64_C(1) << 22)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "%s is %llu, more than 2^22 chunks of %llu bytes: raise chunk_bytes",
                      sizes[i].name, (unsigned long long)sizes[i].value, (unsigned long long)chunk_bytes);
  return GEMINI_OK;
}

gemini_status_t gmi_trace_read(gmi_manager_t *m, gmi_trace_t *trace_out, const char *path) {
  FILE *file = open_trace(m, path);
  if (!file) return gmi_fail(GEMINI_ERR_IO, errno, "trace %s: could not open it: %s", path, strerror(errno));
  gmi_trace_t trace = { .names = gmi_tracer_names(m) };
  reader_t r = { .m = m, .trace = &trace };
  memset(r.arena_of, 0xff, sizeof r.arena_of);
  char line[1024];
  const char *wrong = NULL;
  uint64_t number = 0;
  while (!wrong && next_line(m, file, line, sizeof line)) {
    number++;
    size_t length = strlen(line);
    if (!length || line[length - 1] != '\n') {
      wrong = "a line without an end, or too long";
      break;
    }
    line[length - 1] = 0;
    if (number == 1) wrong = strcmp(line, "gemini-trace 1") ? "not a trace of version 1" : NULL;
    else wrong = read_line(&r, line);
  }
  bool bad = ferror(file);
  fclose(file);
  if (!wrong && !bad && !r.ended) wrong = number ? "the trace ends without a line \"end\"" : "the file is empty";
  else if (!wrong && !bad && !trace.op_count) wrong = "the trace has no op";
  if (wrong || bad) {
    gmi_trace_free(&trace);
    if (bad) return gmi_fail(GEMINI_ERR_IO, EIO, "trace %s: could not read it", path);
    if (!number) return gmi_fail(GEMINI_ERR_FORMAT, 0, "trace %s: %s", path, wrong);
    return gmi_fail(r.lost ? GEMINI_ERR_OOM_SYSTEM : GEMINI_ERR_FORMAT, r.lost ? ENOMEM : 0, "trace %s, line %llu: %s",
                    path, (unsigned long long)number, wrong);
  }
  gemini_status_t status = m->trace.plans_only ? check_chunks(m) : GEMINI_OK;
  if (!status) status = gmi_cut(m);
  if (status) {
    gmi_trace_free(&trace);
    return status;
  }
  for (uint32_t i = 0; i < trace.op_count; i++)
    trace.ops[i].heap_pages = gmi_trace_pages(trace.ops[i].heap_pages, PAGE_UNIT, gmi_frame_bytes(m));
  *trace_out = trace;
  return GEMINI_OK;
}

/* Traces in memory and in files. docs/trace.md describes the file.
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tracer/tracer.h"

static void *grow(void *array, uint32_t count, uint32_t *capacity, size_t size) {
  if (count < *capacity) return array;
  uint32_t more = *capacity ? *capacity * 2 : 64;
  void *bigger = realloc(array, more * size);
  if (bigger) *capacity = more;
  return bigger;
}

gmi_trace_op_t *gmi_trace_add_op(gmi_trace_t *t) {
  gmi_trace_op_t *ops = grow(t->ops, t->op_count, &t->op_capacity, sizeof *ops);
  if (!ops) return NULL;
  t->ops = ops;
  ops[t->op_count] = (gmi_trace_op_t){ .span_first = t->span_count };
  return &ops[t->op_count++];
}
gmi_trace_span_t *gmi_trace_add_span(gmi_trace_t *t) {
  gmi_trace_span_t *spans = grow(t->spans, t->span_count, &t->span_capacity, sizeof *spans);
  if (!spans) return NULL;
  t->spans = spans;
  t->ops[t->op_count - 1].span_count++;
  return &spans[t->span_count++];
}
gmi_trace_update_t *gmi_trace_add_update(gmi_trace_t *t) {
  gmi_trace_update_t *updates = grow(t->updates, t->update_count, &t->update_capacity, sizeof *updates);
  if (!updates) return NULL;
  t->updates = updates;
  memset(&updates[t->update_count], 0, sizeof *updates);
  return &updates[t->update_count++];
}
void gmi_trace_free(gmi_trace_t *t) {
  free(t->ops);
  free(t->spans);
  free(t->updates);
  memset(t, 0, sizeof *t);
}

/* Names are written with every byte outside ! to ~, and %, as %XX. */
static void write_name(FILE *file, const char *name) {
  for (const unsigned char *c = (const unsigned char *)name; *c; c++) {
    if (*c > ' ' && *c <= '~' && *c != '%') fputc(*c, file);
    else fprintf(file, "%%%02X", *c);
  }
}
static bool read_name(const char *text, char *name, size_t size) {
  size_t n = 0;
  for (; *text; text++) {
    unsigned value = (unsigned char)*text;
    if (*text == '%') {
      char hex[3] = { text[1], text[1] ? text[2] : 0, 0 }, *end;
      value = (unsigned)strtoul(hex, &end, 16);
      if (end != hex + 2 || !value) return false;
      text += 2;
    }
    if (n + 1 >= size) return false;
    name[n++] = (char)value;
  }
  name[n] = 0;
  return n > 0;
}

gemini_status_t gmi_trace_write(gmi_manager_t *m, const gmi_trace_t *t, const char *path) {
  FILE *file = fopen(path, "we");
  if (!file) return gmi_fail(GEMINI_ERR_IO, errno, "trace %s: could not open it: %s", path, strerror(errno));
  fprintf(file, "gemini-trace 1\n");
  fprintf(file, "budget %" PRIu64 " %" PRIu64 "\n", UINT64_C(1) << m->window_shift,
          m->config.device_bytes - m->config.device_margin_bytes);
  fprintf(file, "rates %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", t->link_bytes_per_s[0],
          t->link_bytes_per_s[1], t->host_update_ps, t->device_update_ps);
  fprintf(file, "outside %" PRIu64 "\n", t->outside_ns);
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    if (!a) continue;
    fprintf(file, "arena %u %u %u %u %u %" PRIu64 " ", i, a->kind, a->element_bytes, a->like, a->store,
            atomic_load(&a->size));
    write_name(file, a->name);
    fputc('\n', file);
  }
  for (uint32_t i = 0, u = 0; i <= t->op_count; i++) {
    for (; u < t->update_count && t->updates[u].after_op == i; u++) {
      const gmi_trace_update_t *update = &t->updates[u];
      fprintf(file, "update %" PRIu64 " %" PRIu64, update->first_element, update->element_count);
      for (uint32_t k = 0; k < update->arena_count; k++) fprintf(file, " %u:%u", update->arenas[k], update->modes[k]);
      fputc('\n', file);
    }
    if (i == t->op_count) break;
    const gmi_trace_op_t *op = &t->ops[i];
    fprintf(file, "op %u %" PRIu64 " %" PRIu64 " %" PRIu64 " ", op->phase, op->compute_ns, op->nonmodel_peak,
            (uint64_t)op->heap_pages << m->window_shift);
    write_name(file, gmi_tracer_name(m, op->name));
    fputc('\n', file);
    for (uint32_t s = op->span_first; s < op->span_first + op->span_count; s++)
      fprintf(file, "use %u %" PRIu64 " %" PRIu64 " %u\n", t->spans[s].arena, t->spans[s].offset, t->spans[s].size,
              t->spans[s].mode);
  }
  fprintf(file, "end\n");
  bool bad = ferror(file);
  if (fclose(file) || bad)
    return gmi_fail(GEMINI_ERR_IO, errno, "trace %s: could not write it: %s", path, strerror(errno));
  return GEMINI_OK;
}

typedef struct {
  gmi_manager_t *m;
  gmi_trace_t *trace;
  uint32_t arena_of[GMI_ARENAS]; /* the file's arena number to this manager's */
  bool ended;
} reader_t;

/* One line into the trace; NULL when it is right, else what is wrong. */
static const char *read_line(reader_t *r, char *line) {
  gmi_manager_t *m = r->m;
  char name[256], word[512];
  uint32_t number, element_bytes, mode;
  uint64_t a, b, c, d;
  int used = 0;
  if (r->ended) return "text after the end";
  if (!strcmp(line, "end")) {
    r->ended = true;
    return NULL;
  }
  uint32_t kind, like, store;
  if (sscanf(line, "budget %" SCNu64 " %" SCNu64 "%n", &a, &b, &used) == 2) {
    if (line[used] || a < 65536 || a > (UINT64_C(1) << 30) || (a & (a - 1))) return "malformed budget";
    r->trace->window_bytes = a;
    return NULL;
  }
  if (sscanf(line, "outside %" SCNu64 "%n", &a, &used) == 1) {
    if (line[used] || a > (UINT64_C(1) << 56)) return "malformed outside";
    r->trace->outside_ns = a;
    return NULL;
  }
  if (sscanf(line, "rates %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 "%n", &a, &b, &c, &d, &used) == 4) {
    const uint64_t most = UINT64_C(1) << 50;
    if (line[used] || a > most || b > most || c > most || d > most) return "malformed rates";
    r->trace->link_bytes_per_s[0] = a;
    r->trace->link_bytes_per_s[1] = b;
    r->trace->host_update_ps = c;
    r->trace->device_update_ps = d;
    return NULL;
  }
  if (sscanf(line, "arena %" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu64 " %500s%n", &number,
             &kind, &element_bytes, &like, &store, &a, word, &used) == 7) {
    if (line[used] || number >= GMI_ARENAS || like >= GMI_ARENAS || store >= GMI_ARENAS ||
        !read_name(word, name, sizeof name))
      return "malformed arena";
    for (uint32_t i = 0; i < GMI_ARENAS; i++) {
      gmi_arena_t *arena = gmi_arena_at(m, i);
      if (!arena || strcmp(arena->name, name) || arena->kind != kind || arena->element_bytes != element_bytes ||
          atomic_load(&arena->size) != a || (arena->store == i) != (store == number))
        continue;
      r->arena_of[number] = i;
      return NULL;
    }
    return "no arena here has this name, kind, element size and size";
  }
  if (sscanf(line, "op %" SCNu32 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %500s%n", &number, &a, &b, &c, word, &used) ==
      5) {
    if (line[used] || number > GEMINI_PHASE_UPDATE || a > (UINT64_C(1) << 62) || b > (UINT64_C(1) << 46) ||
        c > (UINT64_C(1) << 46) || !read_name(word, name, 128))
      return "malformed op";
    uint32_t id = gmi_tracer_intern(m, name);
    gmi_trace_op_t *op = gmi_trace_add_op(r->trace);
    if (!op || id == GMI_NONE) return "no memory for it";
    op->name = id;
    op->phase = number;
    op->compute_ns = a;
    op->samples = 1;
    op->nonmodel_peak = b;
    op->heap_pages = (uint32_t)((c + (UINT64_C(1) << m->window_shift) - 1) >> m->window_shift);
    return NULL;
  }
  if (sscanf(line, "use %" SCNu32 " %" SCNu64 " %" SCNu64 " %" SCNu32 "%n", &number, &a, &b, &mode, &used) == 4) {
    if (line[used] || number >= GMI_ARENAS || mode < 1 || mode > 3 || !r->trace->op_count) return "malformed use";
    gmi_arena_t *arena = r->arena_of[number] == GMI_NONE ? NULL : gmi_arena_at(m, r->arena_of[number]);
    uint64_t size = arena ? atomic_load(&arena->size) : 0;
    if (!arena || arena->store != arena->index || !b || a > size || b > size - a) return "use outside its arena";
    gmi_trace_span_t *span = gmi_trace_add_span(r->trace);
    if (!span) return "no memory for it";
    *span = (gmi_trace_span_t){ arena->index, mode, a, b };
    return NULL;
  }
  if (sscanf(line, "update %" SCNu64 " %" SCNu64 "%n", &a, &b, &used) == 2) {
    gmi_trace_update_t update = { .after_op = r->trace->op_count, .first_element = a, .element_count = b };
    const char *rest = line + used;
    int more = 0;
    while (update.arena_count < GMI_UPDATE_ARENAS &&
           sscanf(rest, " %" SCNu32 ":%" SCNu32 "%n", &number, &mode, &more) == 2) {
      rest += more;
      gmi_arena_t *arena =
          number < GMI_ARENAS && r->arena_of[number] != GMI_NONE ? gmi_arena_at(m, r->arena_of[number]) : NULL;
      uint64_t elements = arena ? atomic_load(&arena->size) / arena->element_bytes : 0;
      if (!arena || mode < 1 || mode > 3 || !b || a > elements || b > elements - a) return "update outside its arenas";
      update.arenas[update.arena_count] = arena->index;
      update.modes[update.arena_count++] = mode;
    }
    if (*rest || !update.arena_count || !r->trace->op_count) return "malformed update";
    gmi_trace_update_t *record = gmi_trace_add_update(r->trace);
    if (!record) return "no memory for it";
    *record = update;
    return NULL;
  }
  return "not a line of a trace";
}

gemini_status_t gmi_trace_read(gmi_manager_t *m, gmi_trace_t *trace_out, const char *path) {
  FILE *file = fopen(path, "re");
  if (!file) return gmi_fail(GEMINI_ERR_IO, errno, "trace %s: could not open it: %s", path, strerror(errno));
  gmi_trace_t trace = { 0 };
  reader_t r = { .m = m, .trace = &trace };
  memset(r.arena_of, 0xff, sizeof r.arena_of);
  char line[1024];
  const char *wrong = NULL;
  uint64_t number = 0;
  while (!wrong && fgets(line, sizeof line, file)) {
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
  if (!wrong && !bad && (!r.ended || !trace.op_count)) wrong = "the trace has no end, or no op";
  if (wrong || bad) {
    gmi_trace_free(&trace);
    if (bad) return gmi_fail(GEMINI_ERR_IO, EIO, "trace %s: could not read it", path);
    return gmi_fail(GEMINI_ERR_FORMAT, 0, "trace %s, line %llu: %s", path, (unsigned long long)number, wrong);
  }
  *trace_out = trace;
  return GEMINI_OK;
}

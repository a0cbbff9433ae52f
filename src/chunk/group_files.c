/* What the files of a group's checkpoint say. SPDX-License-Identifier: Apache-2.0
 *
 * A part is described like the checkpoint of one process, in the same lines, and by which bytes of each arena it has.
 * So nothing in the files depends on how many ranks will read them, and a checkpoint of one process reads as one part
 * that has all bytes. Runs on the caller's thread under the manager's lock. */
#include "chunk/group_files.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/names.h"
#include "chunk/checkpoint.h"
#include "chunk/shard.h"
#include "io/blockfile.h"
#include "io/store.h"

enum { SECTOR = 512 };
static const char PART_FIRST[] = "gemini-part 1", KEEP_FIRST[] = "gemini-keep 1", ROOT_FIRST[] = "gemini-ranks 1";

const struct gmi_sys *gmi_files_sys_of(const gmi_manager_t *m) { return m->file.sys ? m->file.sys : &gmi_sys_real; }

static gemini_status_t no_memory(void) {
  return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a checkpoint's description");
}

/* ---- spans */
static uint32_t spans_of_slices(gmi_manager_t *m, gmi_arena_t *a, gmi_span_t *spans) {
  const gmi_slicing_t s = gmi_slicing(m, a);
  const uint64_t bytes = a->element_bytes, elements = atomic_load(&a->size) / bytes, full = elements / s.chunk,
                 rest = elements % s.chunk, first = s.start * bytes;
  uint32_t count = 0;
  if (full) spans[count++] = (gmi_span_t){ a->index, first, s.own * bytes, 0, full, s.chunk * bytes, s.stride * bytes };
  if (rest > s.start)
    spans[count++] = (gmi_span_t){ a->index,
                                   first + full * s.chunk * bytes,
                                   (rest - s.start < s.own ? rest - s.start : s.own) * bytes,
                                   full * s.stride * bytes,
                                   1,
                                   0,
                                   0 };
  return count;
}

uint32_t gmi_spans_of(gmi_manager_t *m, gmi_arena_t *a, uint32_t rank, uint32_t ranks,
                      gmi_span_t spans_out[GMI_SPANS_OF_ARENA]) {
  const uint64_t chunk = gmi_chunk_bytes(m), size = atomic_load(&a->size), full = size / chunk, rest = size % chunk;
  uint32_t count = 0;
  if (gmi_arena_is_sharded(a)) return spans_of_slices(m, a, spans_out);
  if (full > rank)
    spans_out[count++] = (gmi_span_t){ a->index,      rank * chunk, chunk, rank * chunk, (full - rank - 1) / ranks + 1,
                                       ranks * chunk, ranks * chunk };
  if (rest && full % ranks == rank)
    spans_out[count++] = (gmi_span_t){ a->index, full * chunk, rest, full * chunk, 1, 0, 0 };
  return count;
}

gmi_arena_t *gmi_saved_store(gmi_manager_t *m, gmi_arena_t *a) {
  return gmi_arena_is_sharded(a) ? gmi_arena_slices(m, a) : a;
}

bool gmi_saved_own(gmi_manager_t *m, gmi_arena_t *a, uint64_t from, uint64_t end, uint64_t *offset_out,
                   uint64_t *size_out, uint64_t *at_out) {
  gmi_slice_t slice = { from, from, end - from };
  uint64_t bytes = 1;
  if (from >= end) return false;
  if (gmi_arena_is_sharded(a)) {
    const gmi_slicing_t s = gmi_slicing(m, a);
    bytes = a->element_bytes;
    if (!gmi_slice_find(&s, from / bytes, end / bytes, &slice)) return false;
  }
  *offset_out = slice.whole * bytes;
  *size_out = slice.count * bytes;
  *at_out = slice.slices * bytes;
  return true;
}

/* ---- parts: writing */
void gmi_part_name(const char *name, const gmi_part_id_t *id, char name_out[GMI_PART_NAME_BYTES]) {
  snprintf(name_out, GMI_PART_NAME_BYTES, "%s.%" PRIu64 "-%" PRIu64 ".%u", name, id->number, id->token, id->rank);
}

bool gmi_part_has_name(const char *name) {
  uint64_t number;
  for (const char *dot = strchr(name, '.'); dot; dot = strchr(dot + 1, '.')) {
    const char *at = dot + 1;
    if (gmi_number_at(&at, '-', UINT64_MAX, &number) && gmi_number_at(&at, '.', UINT64_MAX, &number) &&
        gmi_number_at(&at, 0, UINT64_MAX, &number))
      return true;
  }
  return false;
}

gemini_status_t gmi_part_describe(gmi_manager_t *m, const gmi_part_id_t *id, char **text_out, size_t *size_out) {
  char *text = NULL;
  size_t size = 0;
  FILE *file = open_memstream(&text, &size);
  if (!file) return no_memory();
  fprintf(file, "%s\npart %u %u %" PRIu64 " %" PRIu64 "\n", PART_FIRST, id->rank, id->ranks, id->number, id->token);
  gmi_layout_write(m, file);
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_span_t spans[GMI_SPANS_OF_ARENA];
    gmi_arena_t *a = gmi_arena_at(m, i);
    if (!a || !gmi_arena_is_saved(a)) continue;
    if (gmi_arena_has_sums(a) && a->shard.summed) fprintf(file, "sums %u\n", i);
    const uint32_t count = gmi_spans_of(m, a, id->rank, id->ranks, spans);
    for (uint32_t k = 0; k < count; k++) {
      const gmi_span_t *s = &spans[k];
      fprintf(file, "span %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n",
              s->arena, s->offset, s->size, s->at, s->count, s->step, s->step_at);
    }
  }
  fprintf(file, "end\n");
  if (fclose(file)) {
    free(text);
    return no_memory();
  }
  *text_out = text;
  *size_out = size;
  return GEMINI_OK;
}

/* ---- parts: reading */
typedef struct {
  gmi_manager_t *m;
  gmi_part_t *part;
  const gmi_layout_reader_t *reader;
} lines_t;

/* Does it lie in an arena of size bytes, and end before UINT64_MAX in the part? */
static bool span_is_valid(const gmi_span_t *s, uint64_t size, uint32_t element_bytes) {
  uint64_t more, more_at, end;
  if (!s->size || !s->count || __builtin_mul_overflow(s->count - 1, s->step, &more) ||
      __builtin_mul_overflow(s->count - 1, s->step_at, &more_at) || __builtin_add_overflow(s->offset, s->size, &end) ||
      __builtin_add_overflow(end, more, &end) || end > size || __builtin_add_overflow(s->at, s->size, &end) ||
      __builtin_add_overflow(end, more_at, &end))
    return false;
  if (s->count > 1 && (s->step < s->size || s->step_at < s->size)) return false;
  return !((s->offset | s->size | s->at | s->step | s->step_at) % element_bytes);
}

static bool add_span(gmi_part_t *p, const gmi_span_t *span) {
  gmi_span_t *spans = gmi_array_room(p->spans, p->span_count, &p->span_capacity, sizeof *spans);
  if (!spans) return false;
  p->spans = spans;
  p->spans[p->span_count++] = *span;
  return true;
}

static gmi_arena_t *arena_of(gmi_manager_t *m, const uint32_t *map, uint64_t number) {
  return number < GMI_ARENAS && map[number] != GMI_NONE ? gmi_arena_at(m, map[number]) : NULL;
}

static const char *read_line(void *user, const char *line) {
  const lines_t *l = user;
  gmi_part_t *p = l->part;
  uint64_t n[7];
  if (gmi_word_at(&line, "part")) {
    if (!gmi_numbers_at(&line, 0, UINT64_MAX, 4, n) || n[0] >= n[1] || n[1] > UINT32_MAX) return "which is malformed";
    p->id = (gmi_part_id_t){ (uint32_t)n[0], (uint32_t)n[1], n[2], n[3] };
    return NULL;
  }
  if (gmi_word_at(&line, "sums")) {
    const gmi_arena_t *a =
        gmi_number_at(&line, 0, UINT64_MAX, &n[0]) ? arena_of(l->m, l->reader->arena_of, n[0]) : NULL;
    if (!a) return "which names no arena";
    p->sums[a->index / 32] |= 1u << a->index % 32;
    return NULL;
  }
  if (!gmi_word_at(&line, "span")) return "which is unknown";
  if (!gmi_numbers_at(&line, 0, UINT64_MAX, 7, n)) return "which is malformed";
  const gmi_arena_t *a = arena_of(l->m, l->reader->arena_of, n[0]);
  const gmi_span_t span = { n[0], n[1], n[2], n[3], n[4], n[5], n[6] };
  if (!a || !gmi_arena_is_saved(a)) return "which names no arena that has bytes";
  if (!span_is_valid(&span, atomic_load(&a->size), a->element_bytes)) return "which is out of range";
  return add_span(p, &span) ? NULL : "for which there is no memory";
}

static gmi_layout_reader_t reader_of(gmi_manager_t *m, const gmi_part_t *p) {
  return (gmi_layout_reader_t){ .m = m,
                                .first = p->of_group ? PART_FIRST : KEEP_FIRST,
                                .block_bytes = p->files.index.block_bytes };
}

/* The checkpoint of one process has all bytes of all arenas. */
static gemini_status_t whole_spans(gmi_manager_t *m, gmi_part_t *p) {
  for (uint32_t number = 0; number < GMI_ARENAS; number++) {
    const gmi_arena_t *a = arena_of(m, p->arena_of, number);
    if (!a || !gmi_arena_is_saved(a) || !atomic_load(&a->size)) continue;
    if (!add_span(p, &(gmi_span_t){ number, 0, atomic_load(&a->size), 0, 1, 0, 0 })) return no_memory();
  }
  return GEMINI_OK;
}

/* Sums that a group's gradients would be added to, without a word that they are sums, would be wrong numbers. */
static gemini_status_t check_sums(gmi_manager_t *m, const gmi_part_t *p) {
  for (uint32_t i = 0; i < p->files.index.entry_count; i++) {
    const gmi_arena_t *a = arena_of(m, p->arena_of, p->files.index.entries[i].key >> 32);
    if (a && gmi_arena_has_sums(a) && !(p->sums[a->index / 32] >> a->index % 32 & 1))
      return gmi_fail(
          GEMINI_ERR_FORMAT, 0,
          "it has gradients of arena %s, but does not say whether others are to be added to them: zero them "
          "(gemini_zero()) before the checkpoint",
          a->name);
  }
  return GEMINI_OK;
}

static gemini_status_t part_read(gmi_manager_t *m, const gmi_root_t *root, uint32_t rank, gmi_part_t *p) {
  gmi_layout_reader_t r = reader_of(m, p);
  lines_t lines = { m, p, &r };
  if (p->of_group) {
    r.line = read_line;
    r.user = &lines;
    if (p->files.index.checksum != root->sums[rank])
      return gmi_fail(GEMINI_ERR_FORMAT, 0, "its checksum is %#x, but the checkpoint was made with one of %#x",
                      p->files.index.checksum, root->sums[rank]);
  } else if (p->files.index.checksum != root->checksum || p->files.index.number != root->number) {
    return gmi_fail(GEMINI_ERR_FORMAT, 0, "it was replaced while it was read: checkpoint %" PRIu64 " by %" PRIu64,
                    root->number, p->files.index.number);
  }
  gemini_status_t status = gmi_layout_read(&r, p->files.index.blob, p->files.index.blob_bytes);
  if (status) return status;
  p->chunk_bytes = r.sizes[0];
  p->held_bytes = r.sizes[1];
  memcpy(p->arena_of, r.arena_of, sizeof p->arena_of);
  if (!p->of_group) status = whole_spans(m, p);
  else if (p->id.rank != rank || p->id.ranks != root->parts || p->id.number != root->number ||
           p->id.token != root->token)
    status = gmi_fail(GEMINI_ERR_FORMAT, 0, "it is of rank %u of %u of another checkpoint", p->id.rank, p->id.ranks);
  if (!status && (!p->chunk_bytes || p->held_bytes < p->chunk_bytes || p->held_bytes > p->files.index.block_bytes))
    status = gmi_fail(GEMINI_ERR_FORMAT, 0, "it has chunks of %" PRIu64 " bytes, of which blocks hold %" PRIu64,
                      p->chunk_bytes, p->held_bytes);
  for (uint32_t i = 0; !status && i < p->files.index.entry_count; i++)
    if (!arena_of(m, p->arena_of, p->files.index.entries[i].key >> 32))
      status = gmi_fail(GEMINI_ERR_FORMAT, 0, "it has a block of arena %u, which it does not describe",
                        (uint32_t)(p->files.index.entries[i].key >> 32));
  return status ? status : check_sums(m, p);
}

gemini_status_t gmi_part_open(gmi_manager_t *m, const char *directories, const char *name, const gmi_root_t *root,
                              uint32_t rank, gmi_part_t *part_out) {
  char part_name[GMI_PART_NAME_BYTES];
  gmi_part_t *p = part_out;
  *p = (gmi_part_t){ .of_group = root->of_group };
  if (root->of_group) gmi_part_name(name, &(gmi_part_id_t){ rank, root->parts, root->number, root->token }, part_name);
  gemini_status_t status =
      gmi_saved_open(gmi_files_sys_of(m), directories, root->of_group ? part_name : name, &p->files);
  if (status == GEMINI_ERR_NOT_FOUND) { /* which would mean that there is no checkpoint */
    gmi_failure_t why;
    gmi_fail_keep(status, &why);
    return gmi_fail(GEMINI_ERR_FORMAT, why.native_code, "the checkpoint of %u ranks lacks a file: %s", root->parts,
                    why.message);
  }
  if (status) return status;
  status = part_read(m, root, rank, p);
  if (!status) return GEMINI_OK;
  gmi_fail_prefix("%s: ", p->files.index_path);
  gmi_part_close(p);
  return status;
}

void gmi_part_apply(gmi_manager_t *m, gmi_part_t *p) {
  gmi_part_t ignored = { 0 };
  gmi_layout_reader_t r = reader_of(m, p);
  lines_t lines = { m, &ignored, &r };
  r.apply = true;
  if (p->of_group) {
    r.line = read_line;
    r.user = &lines;
  }
  (void)gmi_layout_read(&r, p->files.index.blob, p->files.index.blob_bytes); /* it was read without failure before */
  free(ignored.spans);
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    if (a && gmi_arena_has_sums(a)) a->shard.summed = p->sums[i / 32] >> i % 32 & 1;
  }
}

void gmi_part_close(gmi_part_t *p) {
  gmi_saved_close(&p->files);
  free(p->spans);
  p->spans = NULL;
}

/* ---- root */
static gemini_status_t root_line(gmi_root_t *r, const char *line, uint32_t *parts_io) {
  uint64_t n[3];
  if (gmi_word_at(&line, "ranks") && !r->sums && gmi_numbers_at(&line, 0, UINT64_MAX, 3, n) && n[0] &&
      n[0] <= GEMINI_GROUP_RANKS) {
    r->parts = (uint32_t)n[0];
    r->number = n[1];
    r->token = n[2];
    r->sums = calloc(n[0], sizeof *r->sums);
    return r->sums ? GEMINI_OK : no_memory();
  }
  if (gmi_word_at(&line, "part") && gmi_numbers_at(&line, 0, UINT32_MAX, 2, n) && n[0] == *parts_io &&
      n[0] < r->parts) {
    r->sums[(*parts_io)++] = (uint32_t)n[1];
    return GEMINI_OK;
  }
  return gmi_fail(GEMINI_ERR_FORMAT, 0, "its text has a line \"%.60s\"", line);
}

static gemini_status_t root_parse(gmi_root_t *r, const gmi_index_t *x) {
  gemini_status_t status = GEMINI_OK;
  char line[256];
  uint32_t parts = 0;
  bool ended = false;
  for (uint64_t at = 0, number = 0; !status && at < x->blob_bytes; number++) {
    const char *text = (const char *)x->blob + at, *end = memchr(text, '\n', x->blob_bytes - at);
    const uint64_t length = end ? (uint64_t)(end - text) : x->blob_bytes - at;
    if (length >= sizeof line || ended) return gmi_fail(GEMINI_ERR_FORMAT, 0, "its text cannot be read");
    memcpy(line, text, length);
    line[length] = 0;
    at += length + 1;
    ended = !strcmp(line, "end");
    if (!number && strcmp(line, ROOT_FIRST) != 0)
      status = gmi_fail(GEMINI_ERR_FORMAT, 0, "it has another format version: %.60s", line);
    else if (number && !ended) status = root_line(r, line, &parts);
  }
  if (!status && (!ended || !r->parts || parts != r->parts))
    status = gmi_fail(GEMINI_ERR_FORMAT, 0, "its text ends early");
  return status;
}

gemini_status_t gmi_root_read(gmi_manager_t *m, const char *directories, const char *name, gmi_root_t *root_out) {
  const gmi_sys_t *sys = gmi_files_sys_of(m);
  gmi_root_t r = { .of_group = true };
  gmi_index_t x = { 0 }, other = { 0 };
  char *path = gmi_saved_path(directories, 0, name, ".ranks"),
       *other_path = gmi_saved_path(directories, 0, name, ".index");
  gemini_status_t status = path && other_path ? gmi_index_read(sys, path, &x) : no_memory();
  const bool none = status == GEMINI_ERR_NOT_FOUND;
  if (!status || none) {
    const gemini_status_t of_one = gmi_index_read(sys, other_path, &other);
    if (!none && of_one != GEMINI_ERR_NOT_FOUND)
      status = gmi_fail(GEMINI_ERR_FORMAT, 0,
                        "there are two checkpoints named %s, %s of several ranks and %s of one process: remove the one "
                        "that is outdated",
                        name, path, other_path);
    else if (none && of_one == GEMINI_ERR_NOT_FOUND)
      status = gmi_fail(GEMINI_ERR_NOT_FOUND, 0, "there is no checkpoint yet: neither %s nor %s", path, other_path);
    else if (none) status = of_one;
  }
  if (!status && none) {
    r.of_group = false;
    r.parts = 1;
    r.number = other.number;
    r.checksum = other.checksum;
  } else if (!status) {
    r.checksum = x.checksum;
    status = root_parse(&r, &x);
    if (status) gmi_fail_prefix("%s: ", path);
  }
  gmi_index_free(&x);
  gmi_index_free(&other);
  free(path);
  free(other_path);
  if (status) gmi_root_free(&r);
  else *root_out = r;
  return status;
}

gemini_status_t gmi_root_write(gmi_manager_t *m, const char *directories, const char *name, const gmi_root_t *root,
                               bool *in_force_out) {
  const gmi_sys_t *sys = gmi_files_sys_of(m);
  char *text = NULL, *path = gmi_saved_path(directories, 0, name, ".ranks"),
       *beside = gmi_saved_path(directories, 0, name, ".ranks.new"), *directory = NULL;
  size_t size = 0;
  FILE *file = path && beside ? open_memstream(&text, &size) : NULL;
  gemini_status_t status = GEMINI_OK;
  *in_force_out = false;
  if (file) {
    fprintf(file, "%s\nranks %u %" PRIu64 " %" PRIu64 "\n", ROOT_FIRST, root->parts, root->number, root->token);
    for (uint32_t i = 0; i < root->parts; i++) fprintf(file, "part %u %u\n", i, root->sums[i]);
    fprintf(file, "end\n");
  }
  if (!file || fclose(file)) status = no_memory();
  if (!status) {
    const gmi_index_t x = {
      .block_bytes = SECTOR, .file_count = 1, .number = root->number, .blob = text, .blob_bytes = size
    };
    status = gmi_index_write(sys, path, beside, &x, in_force_out);
  }
  if (!status) {
    directory = strdup(path);
    if (directory) *strrchr(directory, '/') = 0;
    status = directory ? gmi_directory_sync(sys, *directory ? directory : "/") : no_memory();
  }
  free(text);
  free(path);
  free(beside);
  free(directory);
  return status;
}

void gmi_root_free(gmi_root_t *root) {
  free(root->sums);
  root->sums = NULL;
}

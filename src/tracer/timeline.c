/* Records a timeline and writes it as Chrome trace events, the JSON format that ui.perfetto.dev opens. docs/timeline.md
 * describes tracks and categories. Implements gemini_timeline_start() and gemini_timeline_stop().
 * SPDX-License-Identifier: Apache-2.0
 *
 * A slice is recorded with the fences of its begin and end; their times are read by gmi_timeline_poll() at the end
 * of ops, once the end has been reached, because the device keeps the times of a limited number of marks. */
#include "tracer/timeline.h"
#include "chunk/arena.h"
#include "chunk/group.h"
#include "chunk/heap.h"
#include "chunk/residency.h"
#include "core/streams.h"
#include "core/workers.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file_limit.h"

typedef struct {
  uint8_t type; /* 'X': slice; 'F': slice of a function; 'C': counters; 0: lost */
  bool known;   /* begin and end are times; otherwise fences */
  uint16_t track;
  uint32_t name; /* slice: offset of "KIND\1NAME" in gmi_timeline_t.text */
  uint32_t phase;
  uint64_t begin, end;
  union {
    uint64_t values[4];   /* counters: bytes on device, live non-model, host, file */
    const char *function; /* borrowed for good: __func__ or a literal */
  };
} event_t;

/* A timeline under recording. Invariant: the times of events below polled are known, or the event is lost. */
typedef struct gmi_timeline {
  char *path;
  event_t *events;
  uint64_t count, capacity, polled, lost;
  char *text;
  uint64_t text_size, text_capacity;
  uint64_t begun_ns, counters_ns;
} gmi_timeline_t;

/* Numbers of tracks; a stream's is TRACK_STREAMS plus its index, a worker's TRACK_WORKERS plus its index. */
enum {
  TRACK_CALLER = 1,
  TRACK_STREAMS = 2,
  TRACK_FILES = 98,
  TRACK_CALLS = 99,
  TRACK_WAITS = 100,
  TRACK_WORKERS = 101,
  EVENTS_LIMIT = 4194304 /* the capacity doubles from 4,096 up to this */
};

/* Appends a zeroed event; counts it as lost if the limit is reached or there is no memory. */
static event_t *add_event(gmi_timeline_t *t) {
  if (t->count == t->capacity) {
    uint64_t capacity = t->capacity ? t->capacity * 2 : 4096;
    event_t *events = capacity <= EVENTS_LIMIT ? realloc(t->events, capacity * sizeof *events) : NULL;
    if (!events) {
      t->lost++;
      return NULL;
    }
    t->events = events;
    t->capacity = capacity;
  }
  event_t *e = &t->events[t->count++];
  memset(e, 0, sizeof *e);
  return e;
}

/* Appends "KIND\1NAME"; false: no memory. */
static bool add_text(gmi_timeline_t *t, const char *kind, const char *name, uint32_t *offset_out) {
  size_t need = strlen(kind) + strlen(name) + 3;
  if (t->text_size + need > t->text_capacity) {
    uint64_t capacity = t->text_capacity ? t->text_capacity * 2 : 65536;
    char *text = capacity < UINT32_MAX ? realloc(t->text, capacity) : NULL;
    if (!text) return false;
    t->text = text;
    t->text_capacity = capacity;
  }
  *offset_out = (uint32_t)t->text_size;
  t->text_size += (uint64_t)snprintf(t->text + t->text_size, need, "%s%c%s", kind, 1, name) + 1;
  return true;
}

static void add_slice(gmi_manager_t *m, const char *kind, const char *name, uint64_t begin, uint64_t end, bool known,
                      uint32_t track) {
  gmi_timeline_t *t = m->trace.timeline;
  event_t *e = t ? add_event(t) : NULL;
  if (!e) return;
  e->type = 'X';
  e->known = known;
  e->begin = begin;
  e->end = end;
  e->track = (uint16_t)track;
  e->phase = atomic_load(&m->bracket.phase);
  if (add_text(t, kind, name, &e->name)) return;
  t->count--; /* a slice without a name says nothing */
  t->lost++;
}

void gmi_timeline_slice(gmi_manager_t *m, const char *kind, const char *name, gmi_fence_t begin, gmi_fence_t end) {
  if (!m->trace.timeline) return;
  uint32_t track = TRACK_STREAMS + gmi_fence_stream(begin);
  if (!strcmp(kind, "wait")) track = TRACK_WAITS;
  add_slice(m, kind, name, begin, end, false, track);
}
void gmi_timeline_slice_ns(gmi_manager_t *m, const char *kind, const char *name, uint64_t begin_ns, uint64_t end_ns) {
  if (m->trace.timeline) add_slice(m, kind, name, begin_ns, end_ns, true, TRACK_CALLER);
}

void gmi_timeline_copy(gmi_manager_t *m, const gmi_chunk_t *c, const gmi_link_t *link, uint32_t reason,
                       gmi_fence_t begin, gmi_fence_t end) {
  if (!m->trace.timeline) return;
  char name[GMI_MOVE_NAME_BYTES];
  gmi_move_name(m, c, reason, name);
  gmi_timeline_slice(m, gmi_link_is_fetch(link) ? "fetch" : "evict", name, begin, end);
}

void gmi_timeline_transfer(gmi_manager_t *m, const gmi_chunk_t *c, bool write, uint64_t begin_ns, uint64_t end_ns) {
  if (!m->trace.timeline) return;
  char name[128];
  snprintf(name, sizeof name, "%s %u", gmi_chunk_arena(m, c)->name, c->index);
  add_slice(m, write ? "write" : "read", name, begin_ns, end_ns, true, TRACK_FILES);
}

void gmi_timeline_counters(gmi_manager_t *m) {
  uint64_t now = m->device.ops->now(m->device.self);
  event_t *e = add_event(m->trace.timeline);
  if (!e) return;
  e->type = 'C';
  e->known = true;
  e->begin = now;
  e->values[0] = m->frames.used * gmi_frame_bytes(m);
  e->values[1] = m->nonmodel.heap ? gmi_heap_bytes_used(m->nonmodel.heap) : 0;
  e->values[2] = m->host.used;
  e->values[3] = m->file.used;
}

enum { HELD_NS = 20000 }; /* shorter holds of the lock are not worth an event */
void gmi_timeline_held(gmi_manager_t *m, const char *function, uint64_t begin_ns, uint64_t end_ns) {
  event_t *e = m->trace.timeline && end_ns - begin_ns >= HELD_NS ? add_event(m->trace.timeline) : NULL;
  if (!e) return;
  e->type = 'F';
  e->known = true;
  e->begin = begin_ns;
  e->end = end_ns;
  e->function = function;
}

/* Reads the times of recorded slices in order, up to the first whose end has not been reached (block: waits for it).
 * Times of marks are available for a while only; a slice whose times are gone is lost. */
static void poll_events(gmi_manager_t *m, bool block) {
  gmi_timeline_t *t = m->trace.timeline;
  for (; t->polled < t->count; t->polled++) {
    event_t *e = &t->events[t->polled];
    if (e->known) continue;
    if (!gmi_fence_reached(m, e->end)) {
      if (!block) return;
      gmi_fence_sync(m, e->end);
    }
    uint64_t begin, end;
    e->known = m->device.ops->stream.mark_time(m->device.self, gmi_fence_stream(e->begin), gmi_fence_mark(e->begin),
                                               &begin) == GEMINI_OK &&
               m->device.ops->stream.mark_time(m->device.self, gmi_fence_stream(e->end), gmi_fence_mark(e->end),
                                               &end) == GEMINI_OK;
    if (!e->known) {
      e->type = 0;
      t->lost++;
      continue;
    }
    e->begin = begin;
    e->end = end;
  }
}
/* Appends the intervals that the workers recorded since the last call. */
static void poll_workers(gmi_manager_t *m) {
  gmi_workers_interval_t intervals[64];
  for (uint32_t count; (count = gmi_workers_recorded(m, intervals, 64)) > 0;)
    for (uint32_t i = 0; i < count; i++)
      add_slice(m, intervals[i].norm ? "norm" : "update", intervals[i].norm ? "norm on the host" : "update on the host",
                intervals[i].begin_ns, intervals[i].end_ns, true, TRACK_WORKERS + intervals[i].worker);
}

void gmi_timeline_poll(gmi_manager_t *m) {
  if (!m->trace.timeline) return;
  poll_workers(m);
  poll_events(m, false);
}

/* Bytes of a character of UTF-8 that begins here; 0: none does (RFC 3629, section 4). */
static int utf8_bytes(const unsigned char *s) {
  const int bytes = s[0] < 0x80 ? 1 : s[0] < 0xC2 ? 0 : s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : s[0] < 0xF5 ? 4 : 0;
  for (int i = 1; i < bytes; i++)
    if ((s[i] & 0xC0) != 0x80) return 0; /* the NUL ends it, too */
  const bool too_long = (s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xF0 && s[1] < 0x90);
  const bool none = (s[0] == 0xED && s[1] > 0x9F) || (s[0] == 0xF4 && s[1] > 0x8F); /* surrogates; above U+10FFFF */
  return too_long || none ? 0 : bytes;
}
/* Writes text as the content of a JSON string; leaves out the separator \1. Names are any bytes, JSON is UTF-8: what is
 * none becomes U+FFFD. */
static void write_text(FILE *f, const char *text) {
  for (const unsigned char *s = (const unsigned char *)text; *s;) {
    const int bytes = utf8_bytes(s);
    if (*s == '"' || *s == '\\') fputc('\\', f);
    if (!bytes) fputs("\\ufffd", f);
    else if (*s >= ' ') fwrite(s, 1, (size_t)bytes, f);
    else if (*s != 1) fprintf(f, "\\u%04x", *s);
    s += bytes ? bytes : 1;
  }
}

static void write_track(FILE *f, uint32_t track, const char *name) {
  fprintf(f, ",\n{\"ph\":\"M\",\"pid\":1,\"tid\":%u,\"name\":\"thread_name\",\"args\":{\"name\":\"%s\"}}", track, name);
}

static void stream_name(gmi_manager_t *m, uint32_t stream, char *name_out, size_t size) {
  if (stream == gmi_link_in(m)->stream) snprintf(name_out, size, "copies to the device");
  else if (stream == gmi_link_out(m)->stream) snprintf(name_out, size, "copies from the device");
  else if (stream == m->update.stream) snprintf(name_out, size, "updates on the device");
  else snprintf(name_out, size, "stream %u", stream);
  for (uint32_t i = 0; i < GMI_GROUPS; i++) {
    const gmi_group_t *g = gmi_group_at(m, i);
    if (g && stream == g->gather_stream) snprintf(name_out, size, "gathers of group %u", i);
    if (g && stream == g->reduce_stream) snprintf(name_out, size, "sums of group %u", i);
  }
}

static gemini_status_t write_file(gmi_manager_t *m) {
  static const char *const phases[] = { "none", "forward", "backward", "update" };
  gmi_timeline_t *t = m->trace.timeline;
  FILE *f = fopen(t->path, "we");
  if (!f) return gmi_fail(GEMINI_ERR_IO, errno, "timeline %s: could not open it: %s", t->path, strerror(errno));
  gmi_file_limit_t limit = gmi_file_limit_begin();
  fprintf(f,
          "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"library\":\"libgemini %s\",\"lost_events\":\"%" PRIu64
          "\",\"budget_bytes\":{\"device\":%" PRIu64 ",\"host\":%" PRIu64 ",\"file\":%" PRIu64 "}},\"traceEvents\":[\n",
          GEMINI_VERSION_STRING, t->lost, m->config.device_bytes, m->config.host_bytes, m->config.file_bytes);
  fprintf(f, "{\"ph\":\"M\",\"pid\":1,\"name\":\"process_name\",\"args\":{\"name\":\"libgemini\"}}");
  write_track(f, TRACK_CALLER, "ops on the caller's thread");
  if (m->file.store) write_track(f, TRACK_FILES, "files");
  write_track(f, TRACK_CALLS, "calls that hold the manager's lock");
  write_track(f, TRACK_WAITS, "streams waiting for chunks");
  for (uint32_t i = 0; i < m->config.update_threads; i++) {
    char name[32];
    snprintf(name, sizeof name, "update worker %u", i);
    write_track(f, TRACK_WORKERS + i, name);
  }
  for (uint32_t s = 0; s < GMI_DEVICE_MAX_STREAMS; s++) {
    if (!m->streams[s].life) continue;
    char name[32];
    stream_name(m, s, name, sizeof name);
    write_track(f, TRACK_STREAMS + s, name);
  }
  for (uint64_t i = 0; i < t->count; i++) {
    const event_t *e = &t->events[i];
    double ts = (double)(int64_t)(e->begin - t->begun_ns) * 1e-3;
    if (e->type == 'X') {
      const char *text = t->text + e->name;
      size_t kind = strcspn(text, "\1");
      fprintf(f, ",\n{\"ph\":\"X\",\"pid\":1,\"tid\":%u,\"ts\":%.3f,\"dur\":%.3f,\"cat\":\"%.*s\",\"name\":\"",
              e->track, ts, (double)(e->end - e->begin) * 1e-3, (int)kind, text);
      write_text(f, text + kind);
      fputc('"', f);
      if (kind == 2 && !memcmp(text, "op", 2)) fprintf(f, ",\"args\":{\"phase\":\"%s\"}", phases[e->phase]);
      fputc('}', f);
    } else if (e->type == 'F') {
      fprintf(f, ",\n{\"ph\":\"X\",\"pid\":1,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,\"cat\":\"call\",\"name\":\"%s\"}",
              TRACK_CALLS, ts, (double)(e->end - e->begin) * 1e-3, e->function);
    } else if (e->type == 'C') {
      fprintf(f,
              ",\n{\"ph\":\"C\",\"pid\":1,\"ts\":%.3f,\"name\":\"bytes by tier\",\"args\":{\"device\":%" PRIu64
              ",\"non-model\":%" PRIu64 ",\"host\":%" PRIu64 ",\"file\":%" PRIu64 "}}",
              ts, e->values[0], e->values[1], e->values[2], e->values[3]);
    }
  }
  fprintf(f, "\n]}\n");
  bool bad = ferror(f);
  bad |= fclose(f) != 0;
  gmi_file_limit_end(&limit);
  if (bad)
    return gmi_fail(gmi_file_status(errno), errno, "timeline %s: could not write it: %s", t->path, strerror(errno));
  return GEMINI_OK;
}

void gmi_timeline_close(gmi_manager_t *m) {
  gmi_timeline_t *t = m->trace.timeline;
  if (!t) return;
  free(t->events);
  free(t->text);
  free(t->path);
  free(t);
  m->trace.timeline = NULL;
}

gemini_status_t gmi_timeline_finish(gmi_manager_t *m) {
  gmi_workers_drain(m, "gemini_timeline_stop");
  gmi_lock(m, "gemini_timeline_stop");
  poll_workers(m);
  gmi_workers_record(m, false);
  poll_events(m, true);
  gmi_timeline_counters(m);
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_TEXT, 0);
  gemini_status_t status = write_file(m);
  gmi_wait_end(m, &wait);
  gmi_timeline_close(m);
  gmi_unlock(m);
  return status;
}

static gemini_status_t timeline_start(gmi_manager_t *m, const char *path) {
  if (!path || !*path) return gmi_fail(GEMINI_ERR_INVALID, 0, "path is %s", path ? "empty" : "NULL");
  if (m->trace.timeline)
    return gmi_fail(GEMINI_ERR_STATE, 0, "a timeline is being recorded already, to %s", m->trace.timeline->path);
  gmi_timeline_t *t = calloc(1, sizeof *t);
  if (t) t->path = strdup(path);
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_TEXT, 0);
  /* opens the file now, so that a path that cannot be written is reported by this call */
  FILE *f = t && t->path ? fopen(path, "we") : NULL;
  int error = errno;
  gmi_wait_end(m, &wait);
  if (!f) {
    bool no_memory = !t || !t->path;
    if (t) free(t->path);
    free(t);
    if (no_memory) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a timeline");
    return gmi_fail(GEMINI_ERR_IO, error, "timeline %s: could not open it: %s", path, strerror(error));
  }
  fclose(f);
  t->begun_ns = m->device.ops->now(m->device.self);
  m->trace.timeline = t;
  gmi_timeline_counters(m);
  gmi_workers_record(m, true);
  return GEMINI_OK;
}
gemini_status_t gemini_timeline_start(gemini_manager_t mgr, const char *path) { API_LOCKED(timeline_start(m, path)); }
gemini_status_t gemini_timeline_stop(gemini_manager_t mgr) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  gmi_lock(m, __func__);
  bool recording = m->trace.timeline != NULL;
  gmi_unlock(m);
  API_RETURN(recording ? gmi_timeline_finish(m) : gmi_fail(GEMINI_ERR_STATE, 0, "no timeline is being recorded"));
}

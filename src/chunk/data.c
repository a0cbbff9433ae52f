/* Zero, load, store, norm, and the states that a caller may set. SPDX-License-Identifier: Apache-2.0
 *
 * These calls use ranges without an acquire, on the caller's thread under the manager's lock. Load and store release
 * the lock while they access the caller's file. Calls that change bytes first make sure that no acquire uses the chunks
 * and clear SETTLED, so that acquires without the lock cannot begin meanwhile. A load also claims its chunks, so that
 * none begin while it has released the lock. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/array.h"
#include "base/dtype.h"
#include "base/file_limit.h"
#include "chunk/accesses.h"
#include "chunk/arena.h"
#include "chunk/content.h"
#include "chunk/data.h"
#include "chunk/host.h"
#include "chunk/residency.h"
#include "chunk/shard.h"
#include "chunk/update.h"
#include "core/manager.h"
#include "core/streams.h"
#include "core/workers.h"
#include "io/borrowed.h"

#define NORM_TILE UINT64_C(65536) /* bytes that a norm sums as one tile, aligned to multiples of it in the arena */

/* The part of chunk i that is in the range. */
static void chunk_part(gmi_manager_t *m, const gmi_range_t *r, uint64_t i, uint64_t *begin, uint64_t *end) {
  *begin = i << m->cut.chunk_shift;
  *end = *begin + (UINT64_C(1) << m->cut.chunk_shift);
  if (*begin < r->offset) *begin = r->offset;
  if (*end > r->offset + r->size) *end = r->offset + r->size;
}

/* Checks that no acquire uses the chunk, and sends device acquires to the slow path from now on. */
static gemini_status_t chunk_free_to_change(const gmi_arena_t *store, gmi_chunk_t *c) {
  const char *why = gmi_chunk_unsettle_to_change(c);
  return why ? gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is %s", store->name, why) : GEMINI_OK;
}
static gemini_status_t free_to_change(const gmi_range_t *r) {
  gemini_status_t status = GEMINI_OK;
  for (uint64_t i = r->first; !status && i <= r->last; i++)
    status = chunk_free_to_change(r->store, &r->store->chunks[i]);
  return status;
}

/* ---- lists of byte ranges, in ascending order and without overlap */
typedef struct {
  uint64_t begin, end; /* bytes of the arena */
  uint64_t sum;        /* for a norm: index of the first tile's sum */
} part_t;
typedef struct {
  part_t *parts;
  uint64_t count;
  uint32_t capacity;
  bool lost; /* an allocation failed: the list is incomplete */
} parts_t;

static void parts_add(parts_t *p, uint64_t begin, uint64_t end) {
  if (p->count && begin < p->parts[p->count - 1].end) begin = p->parts[p->count - 1].end; /* tied tensors overlap */
  if (begin >= end) return;
  part_t *parts = gmi_array_room(p->parts, p->count, &p->capacity, sizeof *parts);
  if (!parts) {
    p->lost = true;
    return;
  }
  p->parts = parts;
  if (p->count && p->parts[p->count - 1].end == begin) p->parts[p->count - 1].end = end;
  else p->parts[p->count++] = (part_t){ .begin = begin, .end = end };
}

/* Collects the parts of a range in a reusing arena that hold gradients. */
typedef struct {
  const gmi_range_t *range;
  parts_t parts;
  uint64_t tensors;   /* number of tensors in the range */
  uint64_t other_end; /* end of the last tensor that holds no gradient */
} gradients_t;
static void gradient_part(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  gradients_t *g = user;
  parts_t *p = &g->parts;
  uint64_t begin = t->offset, end = t->offset + t->size, last = p->count ? p->parts[p->count - 1].end : 0;
  (void)m;
  g->tensors++;
  if (!(atomic_load(&t->word) & GMI_TENSOR_GRADIENT)) {
    if (g->other_end < end) g->other_end = end;
    return;
  }
  /* Includes the gap between two gradients, which holds zeros, so that chunks and tiles are not split there. */
  if (p->count && last < begin && begin - last < 4096 && g->other_end <= last) begin = last;
  if (begin < g->range->offset) begin = g->range->offset;
  if (end > g->range->offset + g->range->size) end = g->range->offset + g->range->size;
  parts_add(p, begin, end);
}
/* The parts of a range that hold bytes of its arena: all of it, except that in a reusing arena with tensors only the
 * tensors that hold gradients count. */
static gemini_status_t parts_of(gmi_manager_t *m, const gmi_range_t *r, parts_t *parts_out) {
  gradients_t g = { .range = r };
  if (r->arena->store != r->arena->index) gmi_arena_each(m, r->store, r->offset, r->size, gradient_part, &g);
  if (!g.tensors && r->size) parts_add(&g.parts, r->offset, r->offset + r->size);
  *parts_out = g.parts;
  if (!g.parts.lost) return GEMINI_OK;
  free(g.parts.parts);
  return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the ranges of gradients");
}

/* ---- zero, in two passes: the first does all that can fail and changes no byte */

/* The part of one chunk that becomes zero. */
typedef struct {
  gmi_chunk_t *chunk;
  uint64_t begin, end; /* bytes of the arena */
  enum { ZERO_ALREADY, ZERO_WHOLE, ZERO_ON_DEVICE, ZERO_ON_HOST } how;
} zero_t;

static uint64_t zeros_count(const gmi_manager_t *m, const parts_t *parts) {
  uint64_t count = 0;
  for (uint64_t k = 0; k < parts->count; k++)
    count += ((parts->parts[k].end - 1) >> m->cut.chunk_shift) - (parts->parts[k].begin >> m->cut.chunk_shift) + 1;
  return count;
}

/* Chooses how a chunk is zeroed, and brings the other bytes of the chunk to the tier where that happens. A chunk that
 * is zeroed whole loses all its copies instead: it then reads as zeros. */
static gemini_status_t zero_prepare(gmi_manager_t *m, const gmi_arena_t *store, zero_t *z) {
  gmi_chunk_t *c = z->chunk;
  uint64_t base = (uint64_t)c->index << m->cut.chunk_shift, end = base + (UINT64_C(1) << m->cut.chunk_shift);
  uint64_t used = atomic_load(&store->size);
  gemini_status_t status = GEMINI_OK;
  bool whole = z->begin == base && z->end >= (end < used ? end : used);
  z->how = whole && !gmi_chunk_is_pinned(c)   ? ZERO_WHOLE
           : gmi_chunk_has(c, GMI_VALID_ZERO) ? ZERO_ALREADY
           : gmi_chunk_is_resident(c)         ? ZERO_ON_DEVICE
                                              : ZERO_ON_HOST;
  if (z->how == ZERO_ON_DEVICE) {
    return gmi_chunk_wait(m, gmi_link_in(m)->stream, c, GEMINI_READ_WRITE);
  }
  if (z->how != ZERO_ON_HOST) return GEMINI_OK;
  status = gmi_chunk_to_host(m, c, false, GEMINI_REASON_CALLER);
  return status ? status : gmi_chunk_settle_host(m, c);
}

static gemini_status_t zero_on_device(gmi_manager_t *m, const gmi_arena_t *store, const zero_t *z) {
  gmi_chunk_t *c = z->chunk;
  gmi_fence_t fence = 0;
  gemini_status_t status = gmi_device_zero(m, gmi_link_in(m)->stream, store->base + z->begin, z->end - z->begin);
  if (!status) status = gmi_fence_now(m, gmi_link_in(m)->stream, &fence);
  gmi_chunk_fills(c,
                  status ? gmi_fence_later(m, gmi_link_in(m)->stream) : fence); /* a failed call may have queued it */
  gmi_chunk_wrote(m, c);
  return status;
}

/* Only the device can still fail, so its part comes first. */
static gemini_status_t zero_commit(gmi_manager_t *m, const gmi_arena_t *store, const zero_t *zeros, uint64_t count) {
  gemini_status_t status = GEMINI_OK;
  for (uint64_t i = 0; !status && i < count; i++)
    if (zeros[i].how == ZERO_ON_DEVICE) status = zero_on_device(m, store, &zeros[i]);
  for (uint64_t i = 0; !status && i < count; i++) {
    gmi_chunk_t *c = zeros[i].chunk;
    if (zeros[i].how == ZERO_WHOLE) {
      gmi_chunk_forget(m, c);
    } else if (zeros[i].how == ZERO_ON_HOST) {
      memset(gmi_range_host(m, store, zeros[i].begin), 0, zeros[i].end - zeros[i].begin);
      gmi_chunk_host_wrote(m, c);
    }
  }
  return status;
}

static gemini_status_t zero_parts(gmi_manager_t *m, const gmi_arena_t *store, const parts_t *parts) {
  uint64_t count = zeros_count(m, parts), n = 0, held = 0;
  zero_t *zeros = malloc((count + 1) * sizeof *zeros);
  if (!zeros) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the chunks to be zeroed");
  for (uint64_t k = 0; k < parts->count; k++) {
    uint64_t stop;
    for (uint64_t at = parts->parts[k].begin; at < parts->parts[k].end; at = stop) {
      stop = ((at >> m->cut.chunk_shift) + 1) << m->cut.chunk_shift;
      if (stop > parts->parts[k].end) stop = parts->parts[k].end;
      zeros[n++] = (zero_t){ .chunk = &store->chunks[at >> m->cut.chunk_shift], .begin = at, .end = stop };
    }
  }
  gemini_status_t status = GEMINI_OK;
  for (uint64_t i = 0; !status && i < n; i++)
    status = gmi_updates_queue(m, zeros[i].chunk); /* may move other chunks: comes before the choice */
  /* Checked again, because callbacks ran without the lock: zero_commit() resets whole chunks and would lose their
   * users. */
  for (uint64_t i = 0; !status && i < n; i++) status = chunk_free_to_change(store, zeros[i].chunk);
  for (; !status && held < n; held += !status) {
    status = zero_prepare(m, store, &zeros[held]);
    if (!status) gmi_chunk_hold_host(m, zeros[held].chunk, false); /* bringing the next chunk must not take its slot */
  }
  while (held-- > 0) gmi_chunk_unhold_host(m, zeros[held].chunk, false);
  if (!status) status = zero_commit(m, store, zeros, n);
  free(zeros);
  return status;
}

static void count_tensor(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  (void)m, (void)t;
  ++*(uint64_t *)user;
}

/* Of a sharded arena, each rank zeroes its slices, and of gradients with sums also what has not been added to them. */
static gemini_status_t zero_slices(gmi_manager_t *m, const gmi_range_t *r) {
  if (r->arena->store != r->arena->index)
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0,
                    "gradients of arena %s, which is sharded, cannot be zeroed: an update "
                    "takes those that were not written as zero",
                    r->arena->name);
  gmi_range_t slices;
  parts_t parts = { 0 }, whole = { 0 };
  const bool sums = gmi_arena_has_sums(r->arena);
  bool queued = false; /* does not matter: what follows checks all of it */
  if (!r->size) return GEMINI_OK;
  if (sums && *gmi_parts_updated(m, r->arena))
    return gmi_fail(GEMINI_ERR_STATE, 0,
                    "an update has taken a part of the gradients of arena %s: they can be zeroed when the other parts "
                    "are updated, too",
                    r->arena->name);
  if (gmi_range_content(m, r, false) == GMI_CONTENT_WRONG) return GEMINI_ERR_STATE;
  /* Callbacks of pending updates run first: from the checks on, nothing else begins to use the range. */
  gemini_status_t status = sums ? gmi_updates_queue_range(m, r->store, r->first, r->last, &queued) : GEMINI_OK;
  if (!status) status = sums ? free_to_change(r) : gmi_gathered_settle(m, r, true);
  if (status) return status;
  gmi_range_slices(m, r, &slices);
  if (slices.size) parts_add(&parts, slices.offset, slices.offset + slices.size);
  if (sums) parts_add(&whole, r->offset, r->offset + r->size);
  if (parts.lost || whole.lost)
    status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the range to be zeroed");
  if (!status) status = free_to_change(&slices);
  if (!status) status = zero_parts(m, slices.store, &parts);
  if (!status) status = zero_parts(m, r->store, &whole);
  free(parts.parts);
  free(whole.parts);
  if (!status) gmi_range_written(m, r);
  if (!status && sums && r->size == atomic_load(&r->arena->size)) r->arena->shard.summed = false;
  return status;
}

static gemini_status_t zero_range(gmi_manager_t *m, const gemini_access_t *theirs) {
  gemini_access_t access;
  gmi_range_t r;
  parts_t parts;
  gemini_status_t status = gmi_access_in(&access, theirs, "access");
  if (!status) status = gmi_range_ready_any(m, &access, &r);
  if (!status && gmi_arena_is_sharded(r.arena)) return zero_slices(m, &r);
  if (!status) status = free_to_change(&r);
  if (status || !r.size) return status;
  /* In a reusing arena with tensors, only gradients are zeroed: the other bytes hold parameters. */
  uint64_t tensors = 0;
  bool gradients = r.arena->store != r.arena->index;
  if (gradients) gmi_arena_each(m, r.store, r.offset, r.size, count_tensor, &tensors);
  if (!tensors && gmi_range_content(m, &r, true) == GMI_CONTENT_WRONG) status = GEMINI_ERR_STATE;
  if (!status) status = parts_of(m, &r, &parts);
  if (status) return status;
  status = zero_parts(m, r.store, &parts);
  free(parts.parts);
  if (!status && !tensors) gmi_range_written(m, &r);
  return status;
}
gemini_status_t gemini_zero(gemini_manager_t mgr, const gemini_access_t *access) { API_LOCKED(zero_range(m, access)); }

gemini_status_t gmi_gradients_drop(gmi_manager_t *m, gmi_arena_t *a) {
  gmi_range_t r = { .arena = a, .store = gmi_arena_at(m, a->store), .size = atomic_load(&a->size) };
  gradients_t g = { .range = &r };
  if (!r.size || !atomic_load(&m->cut.chunk_bytes)) return GEMINI_OK;
  gmi_range_chunks(m, &r);
  gemini_status_t status = free_to_change(&r);
  if (status) return status;
  gmi_arena_each(m, r.store, 0, r.size, gradient_part, &g);
  if (g.parts.lost) status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the ranges of gradients");
  if (!status) status = zero_parts(m, r.store, &g.parts);
  free(g.parts.parts);
  r.arena = r.store; /* from now on the bytes are parameters */
  if (!status) gmi_range_written(m, &r);
  return status;
}

/* The exchange at the end fails if the word changed since the check: an acquire without the lock may have come. */
static gemini_status_t state_set(gmi_manager_t *m, gemini_tensor_t tensor, uint32_t state) {
  static const char *const names[] = {
    "FREE", "HOLD", "HOLD_AFTER_FWD", "HOLD_AFTER_BWD", "COMPUTE", "READY_FOR_REDUCE"
  };
  gmi_tensor_t *t = gmi_tensor_get(m, tensor);
  if (!t) return GEMINI_ERR_HANDLE;
  if (state >= GEMINI_STATE_COUNT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "state is %u, must be 0 to %d", state, GEMINI_STATE_COUNT - 1);
  uint64_t word = atomic_load(&t->word);
  uint32_t from = gmi_tensor_state(word);
  bool settable = state == GEMINI_STATE_HOLD || state == GEMINI_STATE_READY_FOR_REDUCE || state == GEMINI_STATE_FREE;
  if (!settable || (word & GMI_TENSOR_USERS) || !gmi_state_legal(from, state))
    return gmi_fail(GEMINI_ERR_STATE, 0, "tensor %s cannot go from %s to %s", gmi_tensor_base(m, t)->name, names[from],
                    names[state]);
  if (state == GEMINI_STATE_FREE) {
    gemini_access_t all = gemini_tensor_access(tensor, 0, 0, 0, 0);
    gemini_status_t status = zero_range(m, &all);
    if (status) return status;
  }
  do {
    if (word & GMI_TENSOR_USERS)
      return gmi_fail(GEMINI_ERR_BUSY, 0, "tensor %s was acquired by another thread during this call",
                      gmi_tensor_base(m, t)->name);
  } while (!atomic_compare_exchange_weak(&t->word, &word, gmi_tensor_word(word, state)));
  gmi_arena_t *a = gmi_arena_at(m, t->arena);
  if (state != GEMINI_STATE_READY_FOR_REDUCE || !gmi_arena_is_gradients(a)) return GEMINI_OK;
  /* From here on the sum may take the parameter's bytes, also of a gradient that was not written, which is zero. */
  if (!gmi_arena_has_sums(a)) atomic_fetch_or(&gmi_tensor_base(m, t)->word, GMI_TENSOR_GRADIENT);
  gemini_status_t status = gmi_reduce_ready(m, a);
  if (status == GEMINI_ERR_PEER) return status;
  /* For want of room: the update, or a norm, tries again. */
  if (status) gmi_log(m, GEMINI_LOG_WARNING, "gradients are not added yet: %s", gmi_fail_message());
  return GEMINI_OK;
}
gemini_status_t gemini_tensor_state_set(gemini_manager_t mgr, gemini_tensor_t tensor, uint32_t state) {
  API_LOCKED(state_set(m, tensor, state));
}

/* ---- load and store */
static const uint64_t READ_AHEAD_BYTES = UINT64_C(64) << 20;
/* Reads or writes all of size, over short and interrupted system calls. *done_out: bytes transferred, also on
 * failure. */
static gemini_status_t transfer(int fd, uint8_t *bytes, uint64_t size, uint64_t offset, bool write,
                                uint64_t *done_out) {
  static const uint64_t most = UINT64_C(1) << 30; /* one system call moves at most 2 GiB - 4 KiB */
  *done_out = 0;
  while (size) {
    size_t part = size < most ? size : most;
    ssize_t n;
    if (write) {
      gmi_file_limit_t limit = gmi_file_limit_begin();
      n = pwrite(fd, bytes, part, (off_t)offset);
      gmi_file_limit_end(&limit);
    } else {
      n = pread(fd, bytes, part, (off_t)offset);
    }
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      return gmi_fail(gmi_file_status(errno), errno, "file descriptor %d, offset %llu: %s of %llu bytes failed: %s", fd,
                      (unsigned long long)offset, write ? "write" : "read", (unsigned long long)size, strerror(errno));
    if (n == 0)
      return gmi_fail(write ? GEMINI_ERR_IO : GEMINI_ERR_FORMAT, 0,
                      "file descriptor %d ends at offset %llu, %llu bytes are missing", fd, (unsigned long long)offset,
                      (unsigned long long)size);
    bytes += n;
    *done_out += (uint64_t)n;
    offset += (uint64_t)n;
    size -= (uint64_t)n;
  }
  return GEMINI_OK;
}

/* Has the system start to read the bytes of a file that a load comes to, up to end. A read that waits for the disk
 * leaves it nothing else to do, and by itself the kernel reads a few 100 KiB ahead: files that are not cached then come
 * at a fraction of the disk's rate. asked: the end of what was asked for before, 0 at first. It is advice: where the
 * system refuses it, reads only take longer. */
static void read_ahead(int fd, uint64_t at, uint64_t end, uint64_t *asked) {
  const uint64_t to = end - at < READ_AHEAD_BYTES ? end : at + READ_AHEAD_BYTES, from = *asked < at ? at : *asked;
  if (from < to) (void)posix_fadvise(fd, (off_t)from, (off_t)(to - from), POSIX_FADV_WILLNEED);
  *asked = to;
}

static gemini_status_t zeros_to_file(int fd, uint64_t size, uint64_t offset) {
  static uint8_t zeros[65536]; /* never written */
  gemini_status_t status = GEMINI_OK;
  for (uint64_t at = 0, done; !status && at < size; at += sizeof zeros)
    status = transfer(fd, zeros, size - at < sizeof zeros ? size - at : sizeof zeros, offset + at, true, &done);
  return status;
}

static gemini_status_t file_check(const gmi_range_t *r, const gmi_chunk_t *c, bool write_file) {
  const char *why = gmi_chunk_busy(c, write_file ? GMI_TO_STORE : GMI_TO_LOAD);
  if (why) return gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is %s", r->store->name, why);
  return GEMINI_OK;
}

static bool in_range(const void *user, const gmi_chunk_t *c) {
  const gmi_range_t *r = user;
  return c->arena == r->store->index && c->index >= r->first && c->index <= r->last;
}

static void load_end(gmi_manager_t *m, const gmi_range_t *r, uint64_t count) {
  for (uint64_t i = 0; i < count; i++) gmi_chunk_load_end(m, &r->store->chunks[r->first + i]);
}
void gmi_load_end(gmi_manager_t *m, const gmi_range_t *r) { load_end(m, r, (uint64_t)r->last - r->first + 1); }
gemini_status_t gmi_load_begin(gmi_manager_t *m, const gmi_range_t *r) {
  gemini_status_t status = GEMINI_OK;
  uint64_t claimed = 0;
  for (; !status && r->first + claimed <= r->last; claimed += !status) {
    gmi_chunk_t *c = &r->store->chunks[r->first + claimed];
    status = gmi_updates_queue(m, c);
    const char *why = status ? NULL : gmi_chunk_load_begin(m, c);
    if (why) status = gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is %s", r->store->name, why);
  }
  if (status) load_end(m, r, claimed);
  return status;
}

/* Brings a chunk to the host, if its bytes are needed there, for the I/O on it. */
static gemini_status_t file_chunk_ready(gmi_manager_t *m, const gmi_range_t *r, gmi_chunk_t *c, bool write_file,
                                        bool *zeros_out) {
  *zeros_out = false;
  if (write_file) {
    gemini_status_t status = file_check(r, c, true); /* again: the lock was released meanwhile */
    if (!status) status = gmi_updates_queue(m, c);
    if (status) return status;
    *zeros_out = gmi_chunk_has(c, GMI_VALID_ZERO); /* a chunk of zeros is stored without host memory */
    if (*zeros_out) return GEMINI_OK;
  }
  gemini_status_t status = gmi_chunk_to_host(m, c, !write_file, GEMINI_REASON_UPDATE);
  return status ? status : gmi_chunk_settle_host(m, c);
}

/* What a load or a store transfers: a range of one arena, or of its slices. */
typedef struct {
  gmi_range_t range;
  const gmi_arena_t *named; /* the caller's arena, and the range's offset there */
  uint64_t named_offset, fd_offset;
} transfer_t;

/* All that can refuse a transfer; changes nothing but where chunks are. */
static gemini_status_t file_prepare(gmi_manager_t *m, transfer_t *t, bool write_file) {
  const gmi_range_t *r = &t->range;
  gemini_status_t status = write_file ? GEMINI_OK : free_to_change(r);
  for (uint64_t i = r->first; !status && i <= r->last; i++) status = file_check(r, &r->store->chunks[i], write_file);
  if (!status && !write_file)
    status = gmi_host_fits(m, "the range", ((uint64_t)r->last - r->first + 1) * gmi_slot_bytes(m), in_range, r);
  return status;
}

/* Works chunk by chunk, so that the range may exceed the host budget. The lock is released during I/O; the chunk is
 * held on the host meanwhile, for a load as a writer. A load has claimed the whole range, so that it is either refused
 * as a whole or ends; one whose I/O fails half-way leaves the chunks before the failure loaded. A store claims nothing:
 * a chunk that another thread acquires for writing meanwhile ends it. */
static gemini_status_t transfer_chunks(gmi_manager_t *m, const transfer_t *t, int fd, bool write_file) {
  const gmi_range_t *r = &t->range;
  gemini_status_t status = GEMINI_OK;
  uint64_t asked = 0;
  for (uint64_t i = r->first; !status && i <= r->last; i++) {
    gmi_chunk_t *c = &r->store->chunks[i];
    uint64_t begin, end, done = 0;
    chunk_part(m, r, i, &begin, &end);
    uint64_t at = t->fd_offset + (begin - r->offset);
    bool zeros;
    status = file_chunk_ready(m, r, c, write_file, &zeros);
    if (status) break;
    gmi_chunk_hold_host(m, c, !write_file);
    uint8_t *bytes = zeros ? NULL : gmi_range_host(m, r->store, begin); /* stays there while the chunk is held */
    gmi_unlock(m);
    const char *function = write_file ? "gemini_store" : "gemini_load";
    gmi_wait_t wait;
    gmi_wait_begin(m, &wait, function, GMI_WAIT_FD, (uint64_t)fd);
    if (!write_file) read_ahead(fd, at, t->fd_offset + r->size, &asked);
    status = zeros ? zeros_to_file(fd, end - begin, at) : transfer(fd, bytes, end - begin, at, write_file, &done);
    gmi_wait_end(m, &wait);
    gmi_lock(m, function);
    gmi_chunk_unhold_host(m, c, !write_file);
    if (!write_file) gmi_chunk_host_wrote(m, c);
    gmi_host_released(m, c);
    if (!write_file && done)
      gmi_arena_each(m, gmi_arena_at(m, t->named->index), t->named_offset + (begin - r->offset), done,
                     gmi_tensor_not_free, NULL);
  }
  return status;
}
static gemini_status_t file_transfer(gmi_manager_t *m, const transfer_t *t, int fd, bool write_file) {
  const gmi_range_t *r = &t->range;
  /* Before the first byte is read: an update that cannot be queued fails a load while nothing has changed. */
  bool queued = false; /* does not matter: each chunk is checked again */
  gemini_status_t status =
      write_file ? gmi_updates_queue_range(m, r->store, r->first, r->last, &queued) : gmi_load_begin(m, r);
  if (status) return status;
  status = transfer_chunks(m, t, fd, write_file);
  if (!write_file) gmi_load_end(m, r);
  return status;
}
gemini_status_t gmi_load_claimed(gmi_manager_t *m, const gmi_range_t *r, int fd, uint64_t fd_offset) {
  const transfer_t t = { *r, r->arena, r->offset, fd_offset };
  gemini_status_t status = transfer_chunks(m, &t, fd, false);
  if (!status) gmi_range_written(m, r);
  return status;
}

/* Of a sharded arena, each rank transfers its slices, to and from their places in the file. The first pass only checks:
 * a load of several slices is refused as a whole, too, unless another thread interferes. */
static gemini_status_t file_slices(gmi_manager_t *m, const gmi_range_t *r, int fd, uint64_t fd_offset,
                                   bool write_file) {
  gemini_status_t status = gmi_gathered_settle(m, r, !write_file);
  if (status) return status;
  const gmi_slicing_t s = gmi_slicing(m, r->arena);
  const uint64_t element = r->arena->element_bytes;
  uint64_t end = (r->offset + r->size + element - 1) / element;
  for (int pass = 0; pass < 2; pass++) {
    gmi_slice_t slice;
    for (uint64_t at = r->offset / element; !status && gmi_slice_find(&s, at, end, &slice);
         at = slice.whole + slice.count) {
      transfer_t t = { .named = r->arena, .named_offset = slice.whole * element };
      uint64_t stop = t.named_offset + slice.count * element, skip = 0;
      if (t.named_offset < r->offset) skip = r->offset - t.named_offset; /* the range begins within an element */
      t.named_offset += skip;
      if (stop > r->offset + r->size) stop = r->offset + r->size;
      t.fd_offset = fd_offset + (t.named_offset - r->offset);
      gmi_arena_t *slices = gmi_arena_slices(m, r->arena);
      t.range = (gmi_range_t){ .arena = slices,
                               .store = gmi_arena_at(m, slices->store),
                               .offset = slice.slices * element + skip,
                               .at = slice.slices * element + skip,
                               .size = stop - t.named_offset };
      gmi_range_chunks(m, &t.range);
      status = pass ? file_transfer(m, &t, fd, write_file) : file_prepare(m, &t, write_file);
    }
  }
  return status;
}

static gemini_status_t file_range(gmi_manager_t *m, const gemini_access_t *theirs, int fd, uint64_t fd_offset,
                                  bool write_file) {
  gemini_access_t access;
  gmi_range_t r;
  gemini_status_t status = gmi_access_in(&access, theirs, "access");
  if (!status && fd < 0) status = gmi_fail(GEMINI_ERR_INVALID, EBADF, "fd is %d, must be an open file descriptor", fd);
  const int flags = write_file && !status ? fcntl(fd, F_GETFL) : 0;
  if (flags > 0 && flags & O_APPEND)
    status = gmi_fail(GEMINI_ERR_INVALID, 0, "fd %d was opened with O_APPEND: writes would not be at fd_offset", fd);
  if (!status && write_file && m->file.borrowed && gmi_borrowed_from(m->file.borrowed, fd))
    status = gmi_fail(GEMINI_ERR_STATE, 0, "ranges of the file of fd %d are borrowed: it must not change", fd);
  if (!status) status = gmi_range_ready_any(m, &access, &r);
  if (status || !r.size) return status;
  if (fd_offset > (uint64_t)INT64_MAX - r.size)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "fd_offset is %llu: the range would end behind the largest file offset",
                    (unsigned long long)fd_offset);
  /* A range of an arena is stored as it is: a caller that saves arenas saves their gradients, too. */
  const bool sharded = gmi_arena_is_sharded(r.arena);
  if ((r.tensor || !write_file) && gmi_range_content(m, &r, !write_file && !sharded) == GMI_CONTENT_WRONG)
    return GEMINI_ERR_STATE;
  if (!write_file && gmi_arena_is_gradients(r.arena))
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "gradients of arena %s, which is sharded, cannot be loaded",
                    r.arena->name);
  if (sharded) {
    status = file_slices(m, &r, fd, fd_offset, write_file);
  } else {
    transfer_t t = { r, r.arena, r.offset, fd_offset };
    status = file_prepare(m, &t, write_file);
    if (!status) status = file_transfer(m, &t, fd, write_file);
  }
  if (!status && !write_file) gmi_range_written(m, &r);
  return status;
}
gemini_status_t gemini_load(gemini_manager_t mgr, const gemini_access_t *access, int fd, uint64_t fd_offset) {
  API_LOCKED(file_range(m, access, fd, fd_offset, false));
}
gemini_status_t gemini_store(gemini_manager_t mgr, const gemini_access_t *access, int fd, uint64_t fd_offset) {
  API_LOCKED(file_range(m, access, fd, fd_offset, true));
}

/* ---- norm
 *
 * The range is divided into tiles at multiples of NORM_TILE. Each tile is summed separately, by the device or by a
 * worker on the host, and the sums are added in the order of the tiles. The result is therefore the same to the bit
 * wherever the chunks are and however many workers there are. */
typedef struct {
  const gmi_range_t *range;
  parts_t parts; /* the parts of the range that count */
  uint32_t dtype, width;
  gmi_fence_t after; /* behind the work of the caller's stream so far */
  double *sums;      /* one per tile; NOT_SUMMED: no worker has summed it yet */
  bool queued;       /* the device may still write sums, as the wait for it failed */
} norm_t;
#define NOT_SUMMED (-1.0)

/* Adjacent tiles of one size. */
typedef struct {
  uint64_t begin, bytes, count; /* bytes: of each */
  double *sums;
} tiles_t;
static uint64_t tiles_end(const tiles_t *b) { return b->begin + b->bytes * b->count; }

/* Finds the first tiles in [at, limit), which must begin and end at bounds of tiles or parts. Returns false if there
 * are none. */
static bool next_tiles(const norm_t *n, uint64_t at, uint64_t limit, tiles_t *b) {
  const part_t *parts = n->parts.parts;
  uint64_t low = 0, high = n->parts.count;
  while (low < high) {
    uint64_t mid = (low + high) / 2;
    if (parts[mid].end <= at) low = mid + 1;
    else high = mid;
  }
  if (at >= limit || low == n->parts.count || parts[low].begin >= limit) return false;
  const part_t *part = &parts[low];
  uint64_t begin = part->begin > at ? part->begin : at, end = part->end < limit ? part->end : limit;
  uint64_t left = NORM_TILE - begin % NORM_TILE; /* bytes to the end of the tile */
  *b = (tiles_t){ .begin = begin,
                  .bytes = left < end - begin ? left : end - begin,
                  .count = left == NORM_TILE && end - begin > NORM_TILE ? (end - begin) / NORM_TILE : 1,
                  .sums = &n->sums[part->sum + begin / NORM_TILE - part->begin / NORM_TILE] };
  return true;
}

_Static_assert(GMI_WORKERS_SLICE * 2 % NORM_TILE == 0, "a worker's slice of the narrowest values is whole tiles");
static void sum_span(void *user, const gemini_update_span_t *span) {
  const norm_t *n = user;
  uint64_t begin = span->first_element * n->width, limit = begin + span->element_count * n->width;
  tiles_t b;
  for (uint64_t at = begin; next_tiles(n, at, limit, &b); at = tiles_end(&b))
    gmi_sum_squares_each((uint8_t *)span->ptr[0] + (b.begin - begin), n->dtype, b.bytes / n->width, b.count, b.sums);
}

/* The part of chunk i that is in the range, extended down to the start of its first tile. */
static void norm_part(gmi_manager_t *m, const norm_t *n, uint64_t i, uint64_t *begin, uint64_t *end) {
  chunk_part(m, n->range, i, begin, end);
  *begin -= *begin % NORM_TILE;
}
static bool first_tiles(gmi_manager_t *m, const norm_t *n, uint64_t i, tiles_t *b) {
  uint64_t begin, end;
  norm_part(m, n, i, &begin, &end);
  return next_tiles(n, begin, end, b);
}
static gemini_update_span_t norm_span(gmi_manager_t *m, const norm_t *n, uint64_t i) {
  uint64_t begin, end;
  norm_part(m, n, i, &begin, &end);
  return (gemini_update_span_t){ .struct_size = sizeof(gemini_update_span_t),
                                 .tier = GEMINI_TIER_HOST,
                                 .first_element = begin / n->width,
                                 .element_count = (end - begin) / n->width,
                                 .arena_count = 1,
                                 .ptr = { gmi_range_host(m, n->range->store, begin) } };
}

/* A job for the workers: sums a chunk once its bytes have come and earlier work on its slot is done. */
typedef struct {
  gmi_job_t job;
  gmi_fence_t fences[2];
  gmi_slot_t *slot;
  uint64_t after;
} norm_job_t;
static gemini_status_t sum_by_workers(gmi_manager_t *m, norm_t *n, uint64_t i) {
  gmi_slot_t *slot = &m->host.slots[gmi_chunk_slot(&n->range->store->chunks[i])];
  norm_job_t *j = calloc(1, sizeof *j);
  if (!j) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a norm's record");
  j->slot = slot;
  j->after = slot->work_queued++;
  j->job = (gmi_job_t){ .norm = true, /* next_use stays 0, the most urgent: the caller waits for it */
                        .fn = sum_span,
                        .user = n,
                        .span = norm_span(m, n, i),
                        .element_bytes = { n->width },
                        .fences = j->fences,
                        .slots = &j->slot,
                        .after = &j->after,
                        .slot_count = 1 };
  if (!gmi_fence_reached(m, n->after)) j->fences[j->job.fence_count++] = n->after;
  if (!gmi_fence_reached(m, slot->fence)) j->fences[j->job.fence_count++] = slot->fence;
  gmi_workers_push(m, &j->job);
  return GEMINI_OK;
}

static gemini_status_t sum_chunk(gmi_manager_t *m, norm_t *n, uint64_t i) {
  gmi_chunk_t *c = &n->range->store->chunks[i];
  gemini_status_t status = gmi_updates_queue(m, c);
  uint64_t begin, end;
  tiles_t b;
  if (status || gmi_chunk_has(c, GMI_VALID_ZERO)) return status;
  norm_part(m, n, i, &begin, &end);
  bool device = gmi_chunk_has(c, GMI_VALID_DEVICE);
  if (device) status = gmi_chunk_wait(m, m->update.stream, c, GEMINI_READ);
  else if (!gmi_chunk_has(c, GMI_VALID_HOST)) status = gmi_chunk_to_host(m, c, false, GEMINI_REASON_UPDATE);
  for (uint64_t at = begin; !status && next_tiles(n, at, end, &b); at = tiles_end(&b)) {
    for (uint64_t k = 0; !status && k < b.count; k++) {
      if (device)
        status = m->device.ops->queue.sum_squares(m->device.self, m->update.stream,
                                                  n->range->store->base + b.begin + k * b.bytes, n->dtype,
                                                  b.bytes / n->width, &b.sums[k]);
      else b.sums[k] = NOT_SUMMED;
    }
  }
  return status || device ? status : sum_by_workers(m, n, i);
}

static void norm_wait(gmi_manager_t *m, const gmi_chunk_t *c) {
  if (!gmi_chunk_work_pending(m, c)) return;
  gmi_slot_t *slot = &m->host.slots[gmi_chunk_slot(c)];
  gmi_workers_wait_slot(m, slot, slot->work_queued);
}

/* A worker could not sum the chunk because work that it waited for failed. Tries again on this thread, which gets the
 * error. */
static gemini_status_t sum_again(gmi_manager_t *m, norm_t *n, uint64_t i) {
  gmi_chunk_t *c = &n->range->store->chunks[i];
  gemini_status_t status = GEMINI_OK;
  if (!gmi_chunk_has(c, GMI_VALID_HOST)) status = gmi_chunk_to_host(m, c, false, GEMINI_REASON_UPDATE);
  if (!status) status = gmi_chunk_settle_host(m, c);
  if (status) return status;
  gemini_update_span_t span = norm_span(m, n, i);
  sum_span(n, &span);
  return GEMINI_OK;
}

/* First queues the chunks that are on the device or on the host, which are summed in parallel; then the chunks in
 * files, with a few reads ahead. */
static gemini_status_t sum_chunks(gmi_manager_t *m, norm_t *n) {
  const gmi_range_t *r = n->range;
  gmi_chunk_t *chunks = r->store->chunks;
  uint64_t count = 0, ahead = gmi_updates_ahead(m, 1);
  uint32_t *later = malloc(((uint64_t)r->last - r->first + 1) * sizeof *later);
  if (!later) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a norm's record");
  gemini_status_t status = GEMINI_OK;
  tiles_t b;
  for (uint32_t i = r->first; !status && i <= r->last; i++) {
    if (!first_tiles(m, n, i, &b)) continue;
    if (gmi_chunk_deferred(&chunks[i]) || gmi_chunk_has_only(&chunks[i], GMI_VALID_FILE)) later[count++] = i;
    else status = sum_chunk(m, n, i);
  }
  gmi_fence_t queued;
  if (!status) status = gmi_fence_now(m, m->update.stream, &queued); /* a device may delay sums until a mark */
  for (uint64_t k = 0; !status && k < count; k++) {
    if (k >= ahead) norm_wait(m, &chunks[later[k - ahead]]);
    status = sum_chunk(m, n, later[k]);
  }
  free(later);
  for (uint32_t i = r->first; i <= r->last; i++) /* also after a failure: queued work still writes sums */
    if (first_tiles(m, n, i, &b)) norm_wait(m, &chunks[i]);
  gemini_status_t synced = gmi_fence_now(m, m->update.stream, &queued);
  if (!synced) synced = gmi_fence_sync(m, queued);
  n->queued = synced != GEMINI_OK;
  if (!status) status = synced;
  for (uint32_t i = r->first; !status && i <= r->last; i++)
    if (first_tiles(m, n, i, &b) && *b.sums == NOT_SUMMED) status = sum_again(m, n, i);
  return status;
}

static gemini_status_t norm(gmi_manager_t *m, const gemini_access_t *theirs, uint32_t dtype, gemini_stream_t stream,
                            double *norm_out) {
  gemini_access_t access;
  gmi_range_t r;
  uint32_t s;
  gemini_status_t status = gmi_access_in(&access, theirs, "access");
  if (status) return status;
  if (!norm_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "norm_out is NULL");
  if (dtype > GEMINI_DTYPE_F64)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "dtype is %u, must be 0 to %d", dtype, GEMINI_DTYPE_F64);
  status = gmi_stream_resolve(m, stream, &s);
  if (!status) status = gmi_range_ready_any(m, &access, &r);
  /* Of a gradient arena, bytes without a gradient count as zero. */
  if (!status && r.arena->reused && gmi_range_content(m, &r, false) == GMI_CONTENT_WRONG) status = GEMINI_ERR_STATE;
  if (status) return status;
  uint32_t width = gmi_dtype_bytes(dtype);
  if (r.offset % width || r.size % width)
    return gmi_fail(GEMINI_ERR_INVALID, 0,
                    "the range, %llu + %llu bytes in the arena, is not made of elements of %u bytes (dtype)",
                    (unsigned long long)r.offset, (unsigned long long)r.size, width);
  gmi_range_t named = r;
  const bool sharded = gmi_arena_is_sharded(r.arena);
  if (gmi_arena_is_gradients(r.arena)) status = gmi_reduce_all(m, r.arena);
  if (sharded && !status) status = gmi_gathered_settle(m, &named, false);
  if (status) return status;
  if (sharded) gmi_range_slices(m, &named, &r);
  norm_t n = { .range = &r, .dtype = dtype, .width = width };
  if (sharded && r.size) parts_add(&n.parts, r.offset, r.offset + r.size);
  else if (!sharded) status = parts_of(m, &r, &n.parts);
  if (n.parts.lost) status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the ranges of a norm");
  if (status) return status;
  uint64_t tiles = 0;
  for (uint64_t k = 0; k < n.parts.count; k++) {
    part_t *part = &n.parts.parts[k];
    part->sum = tiles;
    tiles += (part->end - 1) / NORM_TILE - part->begin / NORM_TILE + 1;
  }
  gmi_leftover_t *memory = calloc(1, sizeof *memory + tiles * sizeof *n.sums);
  n.sums = memory ? (double *)(memory + 1) : NULL;
  if (!n.sums) status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the sums of a norm");
  if (!status && s != GMI_CALLER) {
    status = gmi_fence_now(m, s, &n.after);
    if (!status) status = gmi_fence_wait(m, m->update.stream, n.after);
  }
  if (!status && tiles) status = sum_chunks(m, &n);
  double sum = 0;
  for (uint64_t i = 0; !status && i < tiles; i++) sum += n.sums[i];
  if (n.queued) gmi_leave_over(m, memory);
  else free(memory);
  free(n.parts.parts);
  if (!status && sharded)
    status = gmi_group_sum(m, gmi_group_at(m, named.arena->shard.group), gmi_range_name(m, &named), &sum);
  if (!status)
    *norm_out = isnan(sum) ? (double)NAN : sqrt(sum); /* one NaN for all: its bits would depend on the device */
  return status;
}
gemini_status_t gemini_norm(gemini_manager_t mgr, const gemini_access_t *access, uint32_t dtype, gemini_stream_t stream,
                            double *norm_out) {
  API_LOCKED(norm(m, access, dtype, stream, norm_out));
}

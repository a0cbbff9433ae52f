/* Non-model memory, host blocks, streams. SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "gemini/graph.h"
#include "gemini/hook.h"
#include "tester.h"

static void check_apart(actor_t *a, const uint8_t *ptr, uint64_t size, const uint8_t *other, uint64_t other_size) {
  if (ptr < other + other_size && other < ptr + size) differs(a, "two live allocations overlap");
}

/* ---- device memory: entry, size, stream, kind of call, seed */
static uint64_t usable(const manager_t *m) { return m->config.device_bytes - m->config.device_margin_bytes; }

/* A stream as hooks take it: on a GPU its native handle, where NULL is the default stream. */
static void *native_of(actor_t *a, manager_t *m, gemini_stream_t stream) {
  void *native = NULL;
  if (!a->w->options.cuda) return (void *)(uintptr_t)stream;
  if (stream) QUIET(a, OK, gemini_stream_native, m->handle, stream, &native);
  return native;
}

void run_alloc(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  int entry = (int)op->arg[0], stream = (int)op->arg[2] - 1;
  uint64_t size = op->arg[1], chunk = chunk_bytes(a, m);
  if (!m->open || entry >= ALLOCS || p->allocs[entry].live || stream >= STREAMS) return;
  gemini_stream_t handle = stream_handle(a, m, stream);
  if (!handle) stream = -1;
  bool hook = op->arg[3] && m->hooked && (handle || !a->w->options.cuda);
  statuses_t perhaps = no_room(a, m, chunk ? (size + chunk - 1) / chunk + 1 : 0), allowed = OK | perhaps;
  if (!size) allowed = INVALID;
  else if (!a->w->parallel && size > usable(m)) allowed = OOM_DEVICE;
  void *ptr = NULL;
  if (hook) {
    void *native = native_of(a, m, handle);
    call_begin(a, "gemini_torch_malloc", true);
    ptr = op->arg[3] == 1 ? gemini_torch_malloc((ptrdiff_t)size, 0, native) : gemini_cupy_malloc(native, size, 0);
    gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
    if (!ptr && size) (void)!gemini_last_error(&info);
    if (!size) allowed = OK;
    if (call_end(a, op->arg[3] == 1 ? "gemini_torch_malloc" : "gemini_cupy_malloc", allowed, info.status) || !size)
      return;
  } else {
    if (CALL(a, allowed, gemini_alloc, m->handle, size, handle, &ptr)) {
      if (ptr) differs(a, "a failed call has set its result");
      return;
    }
  }
  if ((uintptr_t)ptr % 512) differs(a, "an allocation at %p is not aligned to 512 bytes", ptr);
  for (int i = 0; i < ALLOCS; i++)
    if (p->allocs[i].live) check_apart(a, ptr, size, p->allocs[i].ptr, p->allocs[i].size);
  uint64_t seed = op->arg[4];
  p->allocs[entry] = (alloc_t){ true, hook, ptr, size, seed, stream };
  use_bytes(a, m, stream, ptr, 0, size, NULL, true, seed, "");
}
bool make_alloc(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  int entry = PICK_FREE(p->allocs, ALLOCS);
  if (entry < 0) return false;
  uint64_t unit = a->w->unit, size = chance(a, 70) ? 1 + rnd(a, 20000) : 1 + rnd(a, (uint32_t)unit * 2);
  op_add(op, (uint32_t)entry);
  op_add(op, chance(a, 2) ? 0 : chance(a, 2) ? unit * 200 : size);
  op_add(op, (uint32_t)(chance(a, 50) ? -1 : PICK(a, p->streams, STREAMS)) + 1);
  op_add(op, chance(a, 50) ? 0 : 1 + rnd(a, 2));
  op_add(op, 1 + rnd(a, 1 << 20));
  return true;
}

/* Arguments: entry, stream, kind of call. 0: gemini_free(); 1: the hook's function, if a hook allocated it; 2: an
 * address that is no allocation; 3: a second free. */
void run_free(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  int entry = (int)op->arg[0], stream = (int)op->arg[1] - 1;
  if (!m->open || entry >= ALLOCS || !p->allocs[entry].live || stream >= STREAMS) return;
  alloc_t *al = &p->allocs[entry];
  gemini_stream_t handle = stream_handle(a, m, stream);
  if (!handle) stream = -1;
  if (op->arg[2] == 2) { /* an address in the middle of the allocation */
    CALL(a, INVALID, gemini_free, m->handle, al->ptr + al->size / 2 + 1, handle);
    return;
  }
  uint8_t *expected = malloc(al->size + 1);
  pattern_fill(expected, 0, al->size, al->seed);
  use_bytes(a, m, al->stream, al->ptr, 0, al->size, expected, false, 0, "non-model memory");
  free(expected);
  if (al->stream >= 0 && al->stream != stream) {
    gemini_stream_t other = stream_handle(a, m, al->stream);
    if (other) QUIET(a, OK, gemini_stream_synchronize, m->handle, other);
  }
  if (op->arg[2] == 1 && al->hooked) {
    void *native = native_of(a, m, handle);
    call_begin(a, "gemini_torch_free", true);
    gemini_torch_free(al->ptr, (ptrdiff_t)al->size, 0, native);
    call_end(a, "gemini_torch_free", OK, GEMINI_OK);
  } else if (CALL(a, OK, gemini_free, m->handle, al->ptr, handle)) {
    return;
  }
  al->live = false;
  if (op->arg[2] == 3 && !a->w->parallel) /* otherwise another thread may have got the address by now */
    QUIET(a, INVALID, gemini_free, m->handle, al->ptr, handle);
}
bool make_free(actor_t *a, op_t *op) {
  part_t *p = part_of(a, manager_of(a, op));
  int entry = PICK(a, p->allocs, ALLOCS);
  if (entry < 0) return false;
  int stream = chance(a, 60) ? p->allocs[entry].stream : chance(a, 50) ? -1 : PICK(a, p->streams, STREAMS);
  op_add(op, (uint32_t)entry);
  op_add(op, (uint32_t)(stream + 1));
  op_add(op, chance(a, 10) ? 2 + rnd(a, 2) : rnd(a, 2));
  return true;
}

/* ---- host memory: entry, size, alignment, seed */
void run_host_alloc(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  int entry = (int)op->arg[0];
  uint64_t size = op->arg[1], alignment = op->arg[2];
  if (!m->open || entry >= BLOCKS || p->blocks[entry].live) return;
  statuses_t allowed = OK | OOM_HOST | OOM_FILE; /* chunks in the way may be unable to move */
  if (!size || alignment & (alignment - 1) || alignment > (UINT64_C(2) << 20)) allowed = INVALID;
  else if (!a->w->parallel && size > m->config.host_bytes) allowed = OOM_HOST;
  void *ptr = NULL;
  if (CALL(a, allowed, gemini_host_alloc, m->handle, size, alignment, &ptr)) {
    if (ptr) differs(a, "a failed call has set its result");
    return;
  }
  if ((uintptr_t)ptr % (alignment ? alignment : 16)) differs(a, "a host block at %p is not aligned", ptr);
  for (int i = 0; i < BLOCKS; i++)
    if (p->blocks[i].live) check_apart(a, ptr, size, p->blocks[i].ptr, p->blocks[i].size);
  p->blocks[entry] = (block_t){ true, ptr, size, op->arg[3] };
  pattern_fill(ptr, 0, size, op->arg[3]);
}
bool make_host_alloc(actor_t *a, op_t *op) {
  part_t *p = part_of(a, manager_of(a, op));
  int entry = PICK_FREE(p->blocks, BLOCKS);
  if (entry < 0) return false;
  op_add(op, (uint32_t)entry);
  op_add(op, chance(a, 2) ? 0 : chance(a, 60) ? 1 + rnd(a, 30000) : 1 + rnd(a, (uint32_t)a->w->unit * 3));
  op_add(op, chance(a, 2) ? 3 : chance(a, 60) ? 0 : 1u << rnd(a, 14));
  op_add(op, 1 + rnd(a, 1 << 20));
  return true;
}

static void check_block(actor_t *a, const block_t *b) {
  uint8_t *expected = malloc(b->size + 1);
  pattern_fill(expected, 0, b->size, b->seed);
  if (memcmp(expected, b->ptr, b->size))
    differs(a, "a host block of %llu bytes has changed", (unsigned long long)b->size);
  free(expected);
}

/* Arguments: entry; 1: an address that is no block. */
void run_host_free(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  int entry = (int)op->arg[0];
  if (!m->open || entry >= BLOCKS || !p->blocks[entry].live) return;
  block_t *b = &p->blocks[entry];
  check_block(a, b);
  if (op->arg[1]) {
    CALL(a, INVALID, gemini_host_free, m->handle, b->ptr + b->size / 2 + 1);
    return;
  }
  if (!CALL(a, OK, gemini_host_free, m->handle, b->ptr)) b->live = false;
}
bool make_host_free(actor_t *a, op_t *op) {
  int entry = PICK(a, part_of(a, manager_of(a, op))->blocks, BLOCKS);
  if (entry < 0) return false;
  op_add(op, (uint32_t)entry);
  op_add(op, chance(a, 5));
  return true;
}

/* ---- hooks: 1 set, 0 clear */
void run_hook(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  bool other = false;
  if (!m->open) return;
  for (int i = 0; i < MANAGERS; i++) other |= &a->w->managers[i] != m && a->w->managers[i].hooked;
  if (op->arg[0]) {
    if (!CALL(a, other ? EXISTS : OK, gemini_hook_set, m->handle, 0)) m->hooked = true;
    return;
  }
  if (!CALL(a, m->hooked ? OK : STATE, gemini_hook_clear, m->handle)) m->hooked = false;
}
bool make_hook(actor_t *a, op_t *op) {
  op_add(op, chance(a, 70));
  return true;
}

/* ---- streams: entry */
void run_stream_create(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  int entry = (int)op->arg[0];
  if (!m->open || entry >= STREAMS || p->streams[entry].live) return;
  gemini_stream_t handle = 0;
  /* A manager has at most 48 streams; two per thread can be more. */
  bool many = a->w->options.threads * STREAMS > 48;
  if (CALL(a, many ? OK | INVALID : OK, gemini_stream_create, m->handle, &handle)) {
    if (handle) differs(a, "a failed call has set its result");
    return;
  }
  p->streams[entry] = (stream_t){ true, handle };
}
bool make_stream_create(actor_t *a, op_t *op) {
  int entry = PICK_FREE(part_of(a, manager_of(a, op))->streams, STREAMS);
  if (entry < 0) return false;
  op_add(op, (uint32_t)entry);
  return true;
}

static int stream_arg(actor_t *a, const op_t *op) {
  const manager_t *m = manager_of(a, op);
  uint32_t entry = op->arg[0];
  return m->open && entry < STREAMS && m->parts[a->index].streams[entry].live ? (int)entry : -1;
}
static bool stream_make(actor_t *a, op_t *op) {
  int entry = PICK(a, part_of(a, manager_of(a, op))->streams, STREAMS);
  if (entry < 0) return false;
  op_add(op, (uint32_t)entry);
  return true;
}

void run_stream_destroy(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  int entry = stream_arg(a, op);
  if (entry < 0) return;
  bool used = a->index == 0 && m->op && m->op_stream == entry;
  if (CALL(a, used ? BUSY : OK, gemini_stream_destroy, m->handle, p->streams[entry].handle)) return;
  gone(a, p->streams[entry].handle);
  p->streams[entry].live = false;
  for (int i = 0; i < HOLDS; i++) /* destroying a stream waits for its work */
    if (p->holds[i].stream == entry) p->holds[i].stream = -1;
  for (int i = 0; i < ALLOCS; i++)
    if (p->allocs[i].stream == entry) p->allocs[i].stream = -1;
}
bool make_stream_destroy(actor_t *a, op_t *op) { return stream_make(a, op); }

void run_stream_sync(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  int entry = stream_arg(a, op);
  if (entry >= 0) CALL(a, OK, gemini_stream_synchronize, m->handle, stream_handle(a, m, entry));
}
bool make_stream_sync(actor_t *a, op_t *op) { return stream_make(a, op); }

static void count_call(void *user) { atomic_fetch_add((_Atomic int *)user, 1); }
void run_stream_call(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  int entry = stream_arg(a, op);
  if (!m->open) return;
  _Atomic int ran = 0;
  gemini_stream_t handle = stream_handle(a, m, entry);
  gemini_status_t status = CALL(a, OK, gemini_stream_call, m->handle, handle, count_call, (void *)&ran);
  if (handle) QUIET(a, OK, gemini_stream_synchronize, m->handle, handle);
  if (atomic_load(&ran) != !status) differs(a, "a function that was queued has run %d times", atomic_load(&ran));
}
bool make_stream_call(actor_t *a, op_t *op) {
  op_add(op, rnd(a, STREAMS + 1));
  return true;
}

/* Calls that only a GPU supports. */
void run_stream_other(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  int entry = stream_arg(a, op);
  if (!m->open || a->w->options.cuda) return;
  gemini_stream_t handle = 0;
  gemini_graph_t graph = 0;
  void *native = NULL;
  CALL(a, UNSUPPORTED, gemini_stream_adopt, m->handle, NULL, &handle);
  QUIET(a, entry < 0 ? INVALID : UNSUPPORTED, gemini_stream_native, m->handle, stream_handle(a, m, entry), &native);
  QUIET(a, NOT_FOUND, gemini_hook_forget, m->handle, NULL);
  if (entry >= 0)
    QUIET(a, UNSUPPORTED, gemini_graph_begin, m->handle, stream_handle(a, m, entry), a->w->unit * 2, &graph);
  if (handle || native || graph) differs(a, "a failed call has set its result");
}
bool make_stream_other(actor_t *a, op_t *op) { return make_stream_call(a, op); }

/* Allocation functions with the signatures that frameworks call: PyTorch's pluggable allocator, CuPy's C functions.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Frameworks call them while holding locks of their own, so nothing here calls user code, not even the log callback:
 * log lines stay queued until the next call of another function sends them. A free never blocks, neither for the device
 * nor for the manager's lock, whose holder may be waiting for the device: a free that would block is put aside in a
 * list, and the next thread that takes the lock carries it out.
 *
 * Frees may come late, at program exit or from a garbage collector, when the manager is closing or closed. Each manager
 * has an entry with the number of calls that use it; close clears the entry and waits for them. The address ranges of
 * allocations that are live at close are remembered, and no later manager gets these addresses until all of them have
 * been freed.
 *
 * Threads: any thread may call any function here. Lock order: the manager's lock, then hook.lock; table_lock is taken
 * alone, or inside the manager's lock, and for short critical sections only. */
#include <sched.h>
#include <stdlib.h>

#include "base/fork.h"
#include "chunk/heap.h"
#include "chunk/hook.h"
#include "chunk/nonmodel.h"
#include "core/manager.h"
#include "core/streams.h"
#include "gemini/hook.h"

enum { DEVICES = 64 };

typedef struct gmi_hook_free {
  void *ptr, *native;
} gmi_hook_free_t;

/* One entry per manager, indexed by gmi_manager_t.identity.entry. The table is static, so a late free can look a
 * manager up without touching its memory, which may be gone. */
static struct {
  gmi_manager_t *_Atomic manager; /* Atomic: NULL = none, or closing */
  _Atomic uint32_t users;         /* Atomic: calls that use manager */
  _Atomic uintptr_t base;         /* Atomic: address range of its allocations; 0 = none yet */
  _Atomic uint64_t range;         /* Atomic: bytes */
  uint64_t late;                  /* frees since close has begun; guarded by table_lock */
} entries[GMI_MANAGERS];
static _Atomic uint32_t serving[DEVICES]; /* Atomic: entry + 1 of the manager that allocates for a device; 0 = none */

/* Address ranges in which the framework still holds allocations: of closed managers, and in a forked child of the
 * parent's managers. */
typedef struct left {
  struct left *next;
  uintptr_t base;
  uint64_t range, live; /* live: allocations not yet freed; 0: of the parent process, whose frees are ignored */
} left_t;
static left_t *left; /* Guarded by table_lock */
/* Guards left and changes of serving[]; reads of serving[] need no lock. */
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- entries
 *
 * Calls increment users before loading manager; close clears manager, then waits for users to reach zero. Each side
 * stores one variable and then loads the other, so both pairs must be sequentially consistent: then either the call
 * sees NULL and leaves, or close sees its count and waits. */
static gmi_manager_t *enter(uint32_t entry) {
  atomic_fetch_add(&entries[entry].users, 1);
  gmi_manager_t *m = atomic_load(&entries[entry].manager);
  if (!m) atomic_fetch_sub(&entries[entry].users, 1);
  return m;
}
/* Release: pairs with the load of users in gmi_hook_close(), so the manager is freed after all accesses of this
 * call. */
static void leave(uint32_t entry) { atomic_fetch_sub_explicit(&entries[entry].users, 1, memory_order_release); }

/* Relaxed: the thread that frees a pointer got it from an allocation that stored base and range before. Any other value
 * can only select the wrong entry, and hook_free() calls lies_in() again after enter(). */
static bool lies_in(uint32_t entry, const void *ptr) {
  uintptr_t base = atomic_load_explicit(&entries[entry].base, memory_order_relaxed);
  return base && (uintptr_t)ptr - base < atomic_load_explicit(&entries[entry].range, memory_order_relaxed);
}

/* ---- fork: the child serves no device, and frees of the parent's allocations do nothing there. The fork holds
 * table_lock, so the child gets a consistent table. */
static void fork_prepare(void) { pthread_mutex_lock(&table_lock); }
static void fork_parent(void) { pthread_mutex_unlock(&table_lock); }
static void fork_child(void) {
  pthread_mutex_init(&table_lock, NULL);
  for (uint32_t i = 0; i < DEVICES; i++) atomic_store(&serving[i], 0);
  for (uint32_t i = 0; i < GMI_MANAGERS; i++) {
    uintptr_t base = atomic_exchange(&entries[i].base, 0);
    left_t *l = base ? malloc(sizeof *l) : NULL; /* out of memory: the child's frees of these pointers report errors */
    if (l) {
      *l = (left_t){ .next = left, .base = base, .range = atomic_load(&entries[i].range) };
      left = l;
    }
    atomic_store(&entries[i].manager, NULL);
    atomic_store(&entries[i].users, 0);
    entries[i].late = 0;
  }
}
static const gmi_fork_ops_t fork_ops = { fork_prepare, fork_parent, fork_child };

static gemini_status_t hook_set(gmi_manager_t *m, uint32_t flags) {
  if (flags) return gmi_fail(GEMINI_ERR_INVALID, 0, "flags has unknown bits %#x", flags);
  if (m->config.device_ordinal >= DEVICES)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "device_ordinal is %u, a hook serves devices 0 to %d",
                    m->config.device_ordinal, DEVICES - 1);
  gmi_fork_watch(&fork_ops);
  pthread_mutex_lock(&table_lock);
  uint32_t has = atomic_load(&serving[m->config.device_ordinal]);
  bool taken = has && has != m->identity.entry + 1;
  if (!taken) {
    atomic_store(&entries[m->identity.entry].manager, m);
    atomic_store(&serving[m->config.device_ordinal], m->identity.entry + 1);
  }
  pthread_mutex_unlock(&table_lock);
  return taken ? gmi_fail(GEMINI_ERR_EXISTS, 0, "another manager serves device %u", m->config.device_ordinal)
               : GEMINI_OK;
}
gemini_status_t gemini_hook_set(gemini_manager_t mgr, uint32_t flags) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? hook_set(m, flags) : GEMINI_ERR_HANDLE);
}

/* Ends the service. Returns whether m was serving its device. The caller holds table_lock. */
static bool serve_no_more(gmi_manager_t *m) {
  uint32_t mine = m->identity.entry + 1;
  return m->config.device_ordinal < DEVICES &&
         atomic_compare_exchange_strong(&serving[m->config.device_ordinal], &mine, 0);
}

gemini_status_t gemini_hook_clear(gemini_manager_t mgr) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  pthread_mutex_lock(&table_lock);
  bool served = serve_no_more(m);
  pthread_mutex_unlock(&table_lock);
  API_RETURN(served ? GEMINI_OK
                    : gmi_fail(GEMINI_ERR_STATE, 0, "the manager serves no device: gemini_hook_set() comes first"));
}

/* Order: no new allocations come (serving), then no new calls enter (manager), then the present ones leave (users),
 * then the put-aside frees are carried out, and what is still live is remembered. Frees that come between the second
 * and the last step are counted (late). */
static void drain(gmi_manager_t *m, bool may_block);
void gmi_hook_close(gmi_manager_t *m) {
  if (atomic_load(&entries[m->identity.entry].manager) != m) return;
  pthread_mutex_lock(&table_lock);
  serve_no_more(m);
  pthread_mutex_unlock(&table_lock);
  atomic_store(&entries[m->identity.entry].manager, NULL);
  while (atomic_load(&entries[m->identity.entry].users)) sched_yield();
  gmi_lock(m, "gemini_manager_close");
  drain(m, true);
  uint64_t live = m->nonmodel.heap ? gmi_heap_marked(m->nonmodel.heap) : 0;
  gmi_unlock(m);
  left_t *l = live ? malloc(sizeof *l) : NULL, *unused = NULL;
  pthread_mutex_lock(&table_lock);
  uint64_t late = entries[m->identity.entry].late; /* freed while neither the manager nor left could be found */
  entries[m->identity.entry].late = 0;
  if (live <= late) {
    unused = l;
  } else if (l) {
    live -= late;
    *l = (left_t){ left, atomic_load(&entries[m->identity.entry].base), atomic_load(&entries[m->identity.entry].range),
                   live };
    left = l;
  }
  atomic_store(&entries[m->identity.entry].base, 0);
  pthread_mutex_unlock(&table_lock);
  free(unused);
}

bool gmi_hook_left(const void *base, uint64_t range) {
  pthread_mutex_lock(&table_lock);
  left_t *l = left;
  while (l && ((uintptr_t)base >= l->base + l->range || l->base >= (uintptr_t)base + range)) l = l->next;
  pthread_mutex_unlock(&table_lock);
  return l != NULL;
}

/* Counts the free of a pointer that belongs to a closed or a closing manager. The range of a closed manager is
 * forgotten with its last free; for a closing manager, gmi_hook_close() subtracts the frees. Ignores the free of a
 * pointer of the parent process. Returns false if the pointer is none of these. */
static bool left_freed(const void *ptr) {
  pthread_mutex_lock(&table_lock);
  for (uint32_t i = 0; i < GMI_MANAGERS; i++) {
    if (atomic_load(&entries[i].manager) || !lies_in(i, ptr)) continue;
    entries[i].late++;
    pthread_mutex_unlock(&table_lock);
    return true;
  }
  left_t **at = &left;
  while (*at && (uintptr_t)ptr - (*at)->base >= (*at)->range) at = &(*at)->next;
  left_t *l = *at;
  bool found = l != NULL, last = found && l->live && --l->live == 0;
  if (last) *at = l->next;
  pthread_mutex_unlock(&table_lock);
  if (last) free(l);
  return found;
}

/* ---- allocation */
/* Logs this thread's recorded failure, the first time only. The caller holds the manager's lock. */
static void tell(gmi_manager_t *m) {
  if (!m->hook.warned)
    gmi_log(m, GEMINI_LOG_WARNING, "hook: %s (later failures of hooks are not logged)", gmi_fail_message());
  m->hook.warned = true;
}

static gemini_status_t free_one(gmi_manager_t *m, void *ptr, void *native, bool may_block) {
  uint32_t stream;
  gemini_status_t status = gmi_stream_of_native(m, native, may_block, &stream);
  if (!status) status = gmi_nonmodel_free(m, ptr, stream) ? GEMINI_OK : GEMINI_ERR_INVALID;
  if (status && status != GEMINI_ERR_BUSY) tell(m);
  return status;
}

/* Appends a free to the list. The caller may or may not hold the manager's lock: hook.lock guards the list, and is held
 * for moments only. waiting is stored relaxed: it is read without hook.lock only as a hint, and a thread that misses it
 * leaves the free to the next one that takes the manager's lock. */
static bool put_aside(gmi_manager_t *m, void *ptr, void *native) {
  pthread_mutex_lock(&m->hook.lock);
  uint32_t count = atomic_load_explicit(&m->hook.waiting, memory_order_relaxed);
  bool room = count < m->hook.capacity;
  if (!room) {
    uint32_t capacity = m->hook.capacity ? m->hook.capacity * 2 : 256;
    gmi_hook_free_t *grown = realloc(m->hook.frees, capacity * sizeof *grown);
    if (grown) m->hook.frees = grown, m->hook.capacity = capacity, room = true;
  }
  if (room) {
    m->hook.frees[count] = (gmi_hook_free_t){ ptr, native };
    atomic_store_explicit(&m->hook.waiting, count + 1, memory_order_relaxed);
  }
  pthread_mutex_unlock(&m->hook.lock);
  return room;
}

/* If the list cannot grow, blocking is the last resort. */
static gemini_status_t free_or_put_aside(gmi_manager_t *m, void *ptr, void *native, bool may_block) {
  gemini_status_t status = free_one(m, ptr, native, may_block);
  if (status != GEMINI_ERR_BUSY || may_block) return status;
  return put_aside(m, ptr, native) ? GEMINI_OK : free_one(m, ptr, native, true);
}

/* Detaches the list before it frees, because a free that would block is put aside again, which takes hook.lock. The
 * array is put back for reuse unless a new one exists. The caller holds the manager's lock. */
static void drain(gmi_manager_t *m, bool may_block) {
  pthread_mutex_lock(&m->hook.lock);
  gmi_hook_free_t *frees = m->hook.frees;
  uint32_t count = atomic_load_explicit(&m->hook.waiting, memory_order_relaxed), capacity = m->hook.capacity;
  m->hook.frees = NULL;
  m->hook.capacity = 0;
  atomic_store_explicit(&m->hook.waiting, 0, memory_order_relaxed);
  pthread_mutex_unlock(&m->hook.lock);
  for (uint32_t i = 0; i < count; i++) free_or_put_aside(m, frees[i].ptr, frees[i].native, may_block);
  pthread_mutex_lock(&m->hook.lock);
  if (!m->hook.frees) {
    m->hook.frees = frees;
    m->hook.capacity = capacity;
    frees = NULL;
  }
  pthread_mutex_unlock(&m->hook.lock);
  free(frees);
}
void gmi_hook_drain(gmi_manager_t *m) { drain(m, false); }

static gemini_status_t hook_alloc(gmi_manager_t *m, uint64_t size, void *native, void **ptr_out) {
  uint32_t stream;
  /* An allocation may block, and needs the memory of frees that would. */
  if (atomic_load_explicit(&m->hook.waiting, memory_order_relaxed)) drain(m, true);
  gemini_status_t status = gmi_stream_of_native(m, native, true, &stream);
  if (!status) status = gmi_nonmodel_alloc(m, size, stream, ptr_out);
  if (status) return status;
  gmi_heap_mark(m->nonmodel.heap, (uint64_t)((uint8_t *)*ptr_out - m->nonmodel.base));
  /* Stored before the pointer is returned: a thread that frees it has synchronized with this one, and finds the
   * entry. */
  if (!lies_in(m->identity.entry, *ptr_out)) {
    atomic_store_explicit(&entries[m->identity.entry].range, m->nonmodel.range, memory_order_relaxed);
    atomic_store_explicit(&entries[m->identity.entry].base, (uintptr_t)m->nonmodel.base, memory_order_relaxed);
  }
  return status;
}

/* The acquire load of serving[] pairs with the store in hook_set(), which sets the entry's manager first. */
static void *hook_malloc(const char *operation, uint64_t size, bool negative, int device, void *native) {
  gemini_status_t status = GEMINI_OK;
  void *ptr = NULL;
  uint32_t entry = device >= 0 && device < DEVICES ? atomic_load_explicit(&serving[device], memory_order_acquire) : 0;
  if (!size) return NULL;
  gmi_manager_t *m = entry ? enter(entry - 1) : NULL;
  if (!m) {
    status = gmi_fail(GEMINI_ERR_STATE, 0, "no manager serves device %d: gemini_hook_set() comes first", device);
  } else {
    gmi_lock_beside(m, operation);
    if (negative) status = gmi_fail(GEMINI_ERR_INVALID, 0, "size is %lld, must not be negative", (long long)size);
    else status = hook_alloc(m, size, native, &ptr);
    if (status) tell(m);
    gmi_unlock_quietly(m);
    leave(entry - 1);
  }
  if (status) gmi_fail_operation(operation);
  return ptr;
}

/* ---- free */
static gemini_status_t hook_free_in(gmi_manager_t *m, const char *operation, void *ptr, void *native) {
  if (!gmi_lock_try(m)) {
    if (put_aside(m, ptr, native)) return GEMINI_OK;
    gmi_lock_beside(m, operation); /* the list could not grow: blocking is the last resort */
  } else {
    gmi_watch_locked(&m->watch, operation);
  }
  if (atomic_load_explicit(&m->hook.waiting, memory_order_relaxed)) drain(m, false);
  gemini_status_t status = free_or_put_aside(m, ptr, native, false);
  gmi_unlock_quietly(m);
  return status;
}

static void hook_free(const char *operation, void *ptr, int device, void *native) {
  if (!ptr) return;
  uint32_t served = device >= 0 && device < DEVICES ? atomic_load_explicit(&serving[device], memory_order_acquire) : 0;
  for (uint32_t i = served ? 0 : 1; i <= GMI_MANAGERS; i++) { /* first the manager that serves the device, then all */
    uint32_t entry = i ? i - 1 : served - 1;
    gmi_manager_t *m = lies_in(entry, ptr) ? enter(entry) : NULL;
    if (!m) continue;
    bool mine = lies_in(entry, ptr); /* again: the entry may have got another manager before enter() */
    gemini_status_t status = mine ? hook_free_in(m, operation, ptr, native) : GEMINI_OK;
    leave(entry);
    if (status) gmi_fail_operation(operation);
    if (mine) return;
  }
  if (left_freed(ptr)) return;
  gmi_fail(GEMINI_ERR_INVALID, 0, "%p does not point to memory that a hook has allocated", ptr);
  gmi_fail_operation(operation);
}

/* ---- the functions that frameworks call */
void *gemini_torch_malloc(ptrdiff_t size, int device, void *stream) {
  return hook_malloc(__func__, (uint64_t)size, size < 0, device, stream);
}
void gemini_torch_free(void *ptr, ptrdiff_t size, int device, void *stream) {
  (void)size;
  hook_free(__func__, ptr, device, stream);
}
void *gemini_cupy_malloc(void *param, size_t size, int device) {
  return hook_malloc(__func__, size, false, device, param);
}
void gemini_cupy_free(void *param, void *ptr, int device) { hook_free(__func__, ptr, device, param); }

static gemini_status_t hook_forget(gmi_manager_t *m, const void *native) {
  for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++)
    if (m->streams[i].life && m->streams[i].hooked && m->streams[i].native == native) return gmi_stream_end(m, i);
  return gmi_fail(GEMINI_ERR_NOT_FOUND, 0, "%p is not a stream that was passed to a hook", native);
}
gemini_status_t gemini_hook_forget(gemini_manager_t mgr, void *stream) { API_LOCKED(hook_forget(m, stream)); }

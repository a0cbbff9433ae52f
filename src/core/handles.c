/* Handles of managers and of their objects. SPDX-License-Identifier: Apache-2.0
 *
 * A static table holds the open managers. Every public call looks its manager up here without a lock; opening and
 * closing a manager change the table under live_lock. A handle is checked by comparing values and is never followed as
 * a pointer, so stale and forged handles are refused. */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/fork.h"
#include "core/manager.h"

/* ---- open managers */
gmi_place_t gmi_places[GMI_MANAGERS];

static pthread_mutex_t live_lock = PTHREAD_MUTEX_INITIALIZER; /* guards changes of gmi_places[], and the two below */

uint64_t gmi_manager_serial; /* Guarded by live_lock. */

/* An object's handle identifies its manager by the entry and the low bits of the serial number. Two managers can have
 * both in common. The objects of the later one then get generations above all generations of the earlier one, so that
 * a handle of a closed manager's object never matches. This table holds, by entry and low bits, the highest generation
 * that any object has had. */
enum { SERIALS = 1 << 12 };

static uint32_t generations_given[GMI_MANAGERS][SERIALS];

static uint32_t *generations_of(const gmi_manager_t *m) {
  return &generations_given[m->identity.entry][m->identity.id & (SERIALS - 1)];
}

static uint32_t generations_highest(const gmi_manager_t *m) {
  uint64_t highest = m->identity.generation_before;
  for (uint32_t i = 0; i < GMI_ARENAS; i++)
    if (m->arenas.generations[i] > highest) highest = m->arenas.generations[i];
  for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++)
    if (m->streams[i].generation > highest) highest = m->streams[i].generation;
  for (uint32_t i = 0; i < GMI_GRAPHS; i++)
    if (m->graphs.generations[i] > highest) highest = m->graphs.generations[i];
  for (uint32_t i = 0; i < m->tensors.high; i++)
    if (m->tensors.at[i].generation > highest) highest = m->tensors.at[i].generation;
  return highest < GMI_TENSOR_GENERATIONS ? (uint32_t)highest : GMI_TENSOR_GENERATIONS;
}

/* Lets the generations of all objects continue after before. Called before any handle of these objects exists. */
static void generations_begin(gmi_manager_t *m, uint32_t before) {
  m->identity.generation_before = before;
  for (uint32_t i = 0; i < GMI_ARENAS; i++) m->arenas.generations[i] = before;
  for (uint32_t i = 0; i < GMI_GRAPHS; i++) m->graphs.generations[i] = before;
  for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++) {
    gmi_stream_t *s = &m->streams[i];
    s->generation += before;
    if (atomic_load(&s->life)) atomic_store(&s->life, s->generation);
  }
}

/* ---- fork: a child cannot use its parent's managers; their handles get an error of their own */
static struct {
  uint64_t id;  /* of the parent's manager in this entry; 0: none. Written only in fork_child(). */
  pid_t opener; /* the process that opened it */
} forked[GMI_MANAGERS];

static void fork_prepare(void) { pthread_mutex_lock(&live_lock); }

static void fork_parent(void) { pthread_mutex_unlock(&live_lock); }

static void fork_child(void) {
  pthread_mutex_init(&live_lock, NULL);
  gmi_watch_forked();
  for (uint32_t entry = 0; entry < GMI_MANAGERS; entry++) {
    uint64_t id = atomic_exchange(&gmi_places[entry].id, 0);
    if (id) {
      forked[entry].id = id;
      forked[entry].opener = gmi_places[entry].opener;
      generations_given[entry][id & (SERIALS - 1)] = GMI_TENSOR_GENERATIONS; /* the parent goes on using them */
    }
    gmi_places[entry].manager = NULL;
  }
}

static const gmi_fork_ops_t fork_ops = { fork_prepare, fork_parent, fork_child };

/* Returns true, and records the error, if id belongs to a manager that the parent opened before a fork. */
static bool is_forked(uint64_t id) {
  uint32_t entry = (uint32_t)(id >> 54) & 63;
  uint64_t of = forked[entry].id;
  if (!of || ((of ^ id) & GMI_HANDLE_MANAGER_MASK)) return false;
  gmi_fail(GEMINI_ERR_HANDLE, 0,
           "%#llx belongs to a manager of process %ld, which forked this process: only that process can use it",
           (unsigned long long)id, (long)forked[entry].opener);
  return true;
}

_Static_assert(GMI_DEVICE_MAX_STREAMS <= 1u << GMI_STREAM_INDEX_BITS && GMI_ARENAS <= 1u << GMI_ARENA_INDEX_BITS &&
                   GMI_TENSORS <= 1u << GMI_TENSOR_INDEX_BITS && GMI_GRAPHS <= 1u << GMI_GRAPH_INDEX_BITS,
               "a handle has room for each index");

void *gmi_handle(const gmi_manager_t *m, uint32_t type, uint64_t generation, uint32_t index) {
  return gmi_handle_of((uint64_t)type << 60 | (m->identity.id & GMI_HANDLE_MANAGER_MASK) |
                       generation << gmi_handle_index_bits(type) | index);
}

void gmi_handle_wrong(uint64_t id, uint32_t type) {
  static const char *const names[] = { "", "manager", "arena", "tensor", "stream", "graph", "group" };
  gmi_fail(GEMINI_ERR_HANDLE, 0, "%#llx is no %s of this manager", (unsigned long long)id, names[type]);
}

gmi_manager_t *gmi_manager_wrong(uint64_t id) {
  if (!is_forked(id)) gmi_fail(GEMINI_ERR_HANDLE, 0, "%#llx is no open manager", (unsigned long long)id);
  return NULL;
}

/* Gives the manager a free entry and a serial number whose generations are not used up. Returns false if there is none.
 * Called with live_lock held. */
static bool place_take(gmi_manager_t *m) {
  for (uint32_t entry = 0; entry < GMI_MANAGERS; entry++) {
    for (uint32_t i = 1; i <= SERIALS && !atomic_load(&gmi_places[entry].id); i++) {
      uint64_t serial = gmi_manager_serial + i, end = serial & (SERIALS - 1);
      if (generations_given[entry][end] >= GMI_TENSOR_GENERATIONS) continue;
      gmi_manager_serial = serial;
      m->identity.entry = entry;
      m->identity.id = (uint64_t)GMI_HANDLE_MANAGER << 60 | (uint64_t)entry << 54 | end << 42 | serial;
      generations_begin(m, *generations_of(m));
      return true;
    }
  }
  return false;
}

bool gmi_manager_enter(gmi_manager_t *m, bool *full_out) {
  gmi_fork_watch(&fork_ops);
  pthread_mutex_lock(&live_lock);
  bool placed = place_take(m);
  *full_out = true;
  for (uint32_t entry = 0; entry < GMI_MANAGERS; entry++) *full_out &= atomic_load(&gmi_places[entry].id) != 0;
  if (placed) {
    gmi_places[m->identity.entry].manager = m;
    gmi_places[m->identity.entry].opener = getpid();
    atomic_store_explicit(&gmi_places[m->identity.entry].id, m->identity.id, memory_order_release);
  }
  pthread_mutex_unlock(&live_lock);
  return placed;
}

void gmi_manager_leave(gmi_manager_t *m) {
  pthread_mutex_lock(&live_lock);
  *generations_of(m) = generations_highest(m);
  atomic_store_explicit(&gmi_places[m->identity.entry].id, 0, memory_order_release);
  gmi_places[m->identity.entry].manager = NULL;
  pthread_mutex_unlock(&live_lock);
}

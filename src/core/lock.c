/* The manager's lock, update callbacks in the middle of a call, and the log.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A plain mutex suffices: most calls that take it move data, which takes far longer. Three duties come with it. A
 * blocked thread is listed as a wait (core/watch.h). A thread that gets the lock carries out frees that hooks have put
 * aside. Log messages are queued under the lock and sent after it is released, as the log callback may call the
 * library. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/names.h"
#include "core/manager.h"

/* Builds with GEMINI_CHECK record the lock's holder, as the address of a thread-local variable. */
#ifdef GEMINI_CHECK
static uintptr_t me(void) {
  static _Thread_local char mine;
  return (uintptr_t)&mine;
}
bool gmi_lock_is_mine(gmi_manager_t *m) { return atomic_load(&m->check.lock_owner) == me(); }
static void taken(gmi_manager_t *m) { atomic_store(&m->check.lock_owner, me()); }
static void about_to_give(gmi_manager_t *m) {
  GMI_ASSERT(gmi_lock_is_mine(m));
  m->check.call(m);
  atomic_store(&m->check.lock_owner, 0);
}
#else
bool gmi_lock_is_mine(gmi_manager_t *m) { return m != NULL; }
static void taken(gmi_manager_t *m) { (void)m; }
static void about_to_give(gmi_manager_t *m) { (void)m; }
#endif

static inline bool try_lock(gmi_manager_t *m) {
  if (pthread_mutex_trylock(&m->lock)) return false;
  taken(m);
  return true;
}
bool gmi_lock_try(gmi_manager_t *m) { return try_lock(m); }

/* A timeline shows who has held the lock, and for how long. */
static inline void hold_begins(gmi_manager_t *m, const char *function) {
  if (!m->trace.timeline) return;
  m->trace.holder = function;
  m->trace.held_ns = m->device.ops->now(m->device.self);
}
static inline void hold_ends(gmi_manager_t *m) {
  const char *function = m->trace.holder;
  if (!function) return;
  m->trace.holder = NULL;
  m->trace.observer->lock_held(m, function, m->trace.held_ns, m->device.ops->now(m->device.self));
}

static inline void give(gmi_manager_t *m) {
  hold_ends(m);
  about_to_give(m);
  pthread_mutex_unlock(&m->lock);
}
void gmi_unlock_quietly(gmi_manager_t *m) { give(m); }
/* The wait releases the mutex: the record checks and the recorded owner follow it. */
void gmi_lock_wait(gmi_manager_t *m, pthread_cond_t *condition) {
  const char *function = m->trace.holder;
  hold_ends(m);
  about_to_give(m);
  pthread_cond_wait(condition, &m->lock);
  taken(m);
  hold_begins(m, function);
}

static __attribute__((noinline)) void lock_after_wait(gmi_manager_t *m, const char *function) {
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, function, GMI_WAIT_LOCK, 0);
  pthread_mutex_lock(&m->lock);
  gmi_wait_end(m, &wait);
  taken(m);
}

void gmi_lock_beside(gmi_manager_t *m, const char *function) {
  /* The uncontended case costs one try and skips the list of waits. */
  if (!try_lock(m)) lock_after_wait(m, function);
  gmi_watch_locked(&m->watch, function);
  hold_begins(m, function);
  if (atomic_load_explicit(&m->hook.waiting, memory_order_relaxed)) m->hook.when_locked(m);
}

/* The thread that runs a callback may call the library from it; it must not wait for itself. */
void gmi_callbacks_wait(gmi_manager_t *m, const char *function) {
  if (!m->callback.depth || pthread_equal(m->callback.thread, pthread_self())) return;
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, function, GMI_WAIT_CALLBACK, 0);
  while (m->callback.depth) gmi_lock_wait(m, &m->callback.ended);
  gmi_wait_end(m, &wait);
  gmi_watch_locked(&m->watch, function);
}

void gmi_lock(gmi_manager_t *m, const char *function) {
  gmi_lock_beside(m, function);
  gmi_callbacks_wait(m, function);
}

/* depth can exceed 1: a library call from a callback may run further callbacks on the same thread. */
void gmi_callback_begin(gmi_manager_t *m) {
  m->callback.thread = pthread_self();
  m->callback.depth++;
  give(m);
}

void gmi_callback_end(gmi_manager_t *m, const char *function) {
  gmi_lock_beside(m, function);
  if (!--m->callback.depth) pthread_cond_broadcast(&m->callback.ended);
}

/* Copies the queue, as another thread may fill it again once the lock is released. Not inline: its frame is large. */
static __attribute__((noinline)) void give_and_log(gmi_manager_t *m) {
  const uint32_t count = m->log.count;
  int32_t levels[GMI_LOG_QUEUE];
  char texts[GMI_LOG_QUEUE][sizeof m->log.queue[0].text];
  for (uint32_t i = 0; i < count; i++) {
    levels[i] = m->log.queue[i].level;
    memcpy(texts[i], m->log.queue[i].text, sizeof texts[i]);
  }
  m->log.count = 0;
  give(m);
  for (uint32_t i = 0; i < count; i++) m->config.log_fn(m->config.log_user, levels[i], texts[i]);
}
void gmi_unlock(gmi_manager_t *m) {
  if (m->log.count) give_and_log(m);
  else give(m);
}

void gmi_log(gmi_manager_t *m, int32_t level, const char *format, ...) {
  GMI_ASSERT(gmi_lock_is_mine(m));
  if (!m->config.log_fn || level > (int32_t)m->config.log_level || m->log.count == GMI_LOG_QUEUE) return;
  char text[sizeof m->log.queue[0].text];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  gmi_text_escape(m->log.queue[m->log.count].text, sizeof text, text);
  m->log.queue[m->log.count++].level = level;
}

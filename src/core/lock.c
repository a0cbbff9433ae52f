/* The manager's lock, what runs in the middle of a call without it, and logs, which are sent after it.
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/manager.h"

void gmi_lock_beside(gmi_manager_t *m, const char *function) {
  if (pthread_mutex_trylock(&m->lock)) {
    gmi_wait_t wait;
    gmi_wait_begin(m, &wait, function, GMI_WAIT_LOCK, 0);
    pthread_mutex_lock(&m->lock);
    gmi_wait_end(m, &wait);
  }
  gmi_watch_locked(m, function);
  if (atomic_load_explicit(&m->hook_waiting, memory_order_relaxed)) m->when_locked(m);
}

void gmi_callbacks_wait(gmi_manager_t *m, const char *function) {
  if (!m->callbacks || pthread_equal(m->callback_thread, pthread_self())) return;
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, function, GMI_WAIT_CALLBACK, 0);
  while (m->callbacks) pthread_cond_wait(&m->callback_ended, &m->lock);
  gmi_wait_end(m, &wait);
  gmi_watch_locked(m, function);
}

void gmi_lock(gmi_manager_t *m, const char *function) {
  gmi_lock_beside(m, function);
  gmi_callbacks_wait(m, function);
}

void gmi_callback_begin(gmi_manager_t *m) {
  m->callback_thread = pthread_self();
  m->callbacks++;
  pthread_mutex_unlock(&m->lock);
}

void gmi_callback_end(gmi_manager_t *m, const char *function) {
  gmi_lock_beside(m, function);
  if (!--m->callbacks) pthread_cond_broadcast(&m->callback_ended);
}

void gmi_unlock(gmi_manager_t *m) {
  uint32_t count = m->log_count;
  if (!count) {
    pthread_mutex_unlock(&m->lock);
    return;
  }
  int32_t levels[GMI_LOG_QUEUE];
  char texts[GMI_LOG_QUEUE][sizeof m->logs[0].text];
  for (uint32_t i = 0; i < count; i++) {
    levels[i] = m->logs[i].level;
    memcpy(texts[i], m->logs[i].text, sizeof texts[i]);
  }
  m->log_count = 0;
  pthread_mutex_unlock(&m->lock);
  for (uint32_t i = 0; i < count; i++) m->config.log_fn(m->config.log_user, levels[i], texts[i]);
}

void gmi_log(gmi_manager_t *m, int32_t level, const char *format, ...) {
  if (!m->config.log_fn || level > (int32_t)m->config.log_level || m->log_count == GMI_LOG_QUEUE) return;
  va_list args;
  va_start(args, format);
  vsnprintf(m->logs[m->log_count].text, sizeof m->logs[0].text, format, args);
  va_end(args);
  m->logs[m->log_count++].level = level;
}

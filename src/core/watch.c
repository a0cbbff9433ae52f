/* The list of threads that wait inside the library, and its readers: the dump and the watchdog.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each blocked thread links a record on its own stack into the list, under watch.lock. The watchdog thread wakes up
 * after each quarter of the time limit (at least once a second), logs waits that have exceeded the limit, and logs a
 * wait again whenever its time has doubled. With the first report of a wait it logs the manager's state, as the dump
 * writes it, line by line. The dump runs on its caller's thread. */
#include "core/watch.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/thread.h"
#include "core/manager.h"

enum {
  TOLD_AT_ONCE = 16,         /* waits that one pass of the watchdog reports at most */
  LOOKS = 20,                /* attempts of gmi_reading_begin() */
  LOOK_PAUSE_NS = 100000,    /* between two attempts */
  PERIOD_LEAST_NS = 1000000, /* bounds of the time between two passes of the watchdog */
  PERIOD_MOST_NS = 1000000000,
  LINE = 400,
  THREAD_TEXT = 48
};

static _Thread_local uint32_t this_thread; /* the thread id (gettid) of this thread; 0 = not asked yet */
static uint32_t thread_number(void) {
  if (!this_thread) this_thread = (uint32_t)syscall(SYS_gettid);
  return this_thread;
}
void gmi_watch_forked(void) { this_thread = 0; }

/* ---- waits */
static void begin(gmi_manager_t *m, gmi_wait_t *wait) {
  gmi_watch_t *watch = &m->watch;
  wait->thread = thread_number();
  if (!wait->function) {
    wait->has_lock = true;
    wait->function = atomic_load_explicit(&watch->holder, memory_order_relaxed);
  }
  wait->since_ns = gmi_now_ns();
  pthread_mutex_lock(&watch->lock);
  wait->next = watch->first;
  if (watch->first) watch->first->previous = wait;
  watch->first = wait;
  pthread_mutex_unlock(&watch->lock);
}
void gmi_wait_begin(gmi_manager_t *m, gmi_wait_t *wait, const char *function, gmi_wait_kind_t kind, uint64_t number) {
  *wait = (gmi_wait_t){ .function = function, .kind = kind, .number = number };
  begin(m, wait);
}
void gmi_wait_for_ranks(gmi_manager_t *m, gmi_wait_t *wait, const char *function, uint32_t rank, const char *what,
                        const char *label) {
  *wait = (gmi_wait_t){
    .function = function, .kind = GMI_WAIT_RANKS, .number = rank, .what = what, .label = label && *label ? label : NULL
  };
  begin(m, wait);
}

void gmi_wait_end(gmi_manager_t *m, gmi_wait_t *wait) {
  gmi_watch_t *watch = &m->watch;
  pthread_mutex_lock(&watch->lock);
  *(wait->previous ? &wait->previous->next : &watch->first) = wait->next;
  if (wait->next) wait->next->previous = wait->previous;
  pthread_mutex_unlock(&watch->lock);
}

/* The id of the thread that holds the manager's lock, as the mutex itself records it: storing it a second time would
 * cost each call a look into thread-local storage. The C library does not promise the field, and it may change at any
 * moment: 0 or a wrong id is possible, in text for people only. */
static uint32_t holder_thread(gmi_manager_t *m) {
#ifdef __GLIBC__
  return (uint32_t)__atomic_load_n(&m->lock.__data.__owner, __ATOMIC_RELAXED);
#else
  (void)m;
  return 0;
#endif
}

/* ---- waits in words */
/* Writes "12345 (python)", or the number alone if the thread has ended. */
static void name_thread(uint32_t thread, char text_out[THREAD_TEXT]) {
  char path[64], name[32] = "";
  snprintf(path, sizeof path, "/proc/self/task/%u/comm", thread);
  FILE *file = fopen(path, "re");
  if (file) {
    if (fgets(name, sizeof name, file)) name[strcspn(name, "\n")] = 0;
    fclose(file);
  }
  snprintf(text_out, THREAD_TEXT, *name ? "%u (%s)" : "%u", thread, name);
}

const char *gmi_stream_job(gmi_manager_t *m, uint32_t stream) {
  return stream == gmi_link_in(m)->stream                       ? "copies to the device"
         : stream == gmi_link_out(m)->stream                    ? "copies from the device"
         : stream == m->update.stream                           ? "updates on the device"
         : atomic_load(&m->groups.gather_streams) >> stream & 1 ? "gathers chunks"
         : atomic_load(&m->groups.reduce_streams) >> stream & 1 ? "adds gradients"
                                                                : NULL;
}

static void describe_object(gmi_manager_t *m, const gmi_wait_t *wait, char text_out[LINE]) {
  char thread[THREAD_TEXT];
  switch (wait->kind) {
  case GMI_WAIT_LOCK: {
    name_thread(holder_thread(m), thread);
    const char *holder = atomic_load_explicit(&m->watch.holder, memory_order_relaxed);
    snprintf(text_out, LINE, "the manager's lock, which %s() of thread %s has taken", holder ? holder : "?", thread);
    break;
  }
  case GMI_WAIT_STREAM: {
    const char *job = gmi_stream_job(m, (uint32_t)wait->number);
    snprintf(text_out, LINE, "the work queued on stream %" PRIu64 "%s%s", wait->number, job ? ", which " : "",
             job ? job : "");
    break;
  }
  case GMI_WAIT_CHUNK:
    snprintf(text_out, LINE, "an update, a norm or a transfer that uses host slot %" PRIu64, wait->number);
    break;
  case GMI_WAIT_ROOM: snprintf(text_out, LINE, "any update or transfer to end, for room on the host"); break;
  case GMI_WAIT_FILES: snprintf(text_out, LINE, "%" PRIu64 " transfers to and from files", wait->number); break;
  case GMI_WAIT_WORKERS:
    snprintf(text_out, LINE, "the workers to finish %" PRIu64 " submitted parts of updates and norms", wait->number);
    break;
  case GMI_WAIT_COMMIT: snprintf(text_out, LINE, "the checkpoint files to be synced"); break;
  case GMI_WAIT_FD: snprintf(text_out, LINE, "the caller's file, descriptor %" PRIu64, wait->number); break;
  case GMI_WAIT_CALLBACK: snprintf(text_out, LINE, "the caller's update callback"); break;
  case GMI_WAIT_PLAN: snprintf(text_out, LINE, "the planner"); break;
  case GMI_WAIT_MEMORY: snprintf(text_out, LINE, "host memory to be made and page-locked"); break;
  case GMI_WAIT_TEXT: snprintf(text_out, LINE, "the file of a trace or a timeline"); break;
  case GMI_WAIT_SPACE: snprintf(text_out, LINE, "space in files to be reserved or given back"); break;
  case GMI_WAIT_DRIVER: snprintf(text_out, LINE, "the device to change its memory or its streams"); break;
  case GMI_WAIT_RANKS:
    snprintf(text_out, LINE, "the other ranks of its group, as rank %" PRIu64 "%s%s%s%s", wait->number,
             wait->what ? ", in " : "", wait->what ? wait->what : "", wait->label ? " for " : "",
             wait->label ? wait->label : "");
    break;
  case GMI_WAIT_KINDS: *text_out = 0; break;
  }
}

static void describe_wait(gmi_manager_t *m, const gmi_wait_t *wait, uint64_t now, char text_out[2 * LINE]) {
  char thread[THREAD_TEXT], object[LINE];
  name_thread(wait->thread, thread);
  describe_object(m, wait, object);
  snprintf(text_out, 2 * LINE, "thread %s has waited %.3f s in %s%s%s for %s", thread,
           (double)(now - wait->since_ns) / 1e9, wait->function, strchr(wait->function, ' ') ? "" : "()",
           wait->has_lock ? ", with the manager's lock," : "", object);
}

/* ---- the watchdog */
static void log_state(gmi_manager_t *m) {
  char *text = NULL, line[2 * LINE];
  size_t length = 0;
  FILE *file = open_memstream(&text, &length);
  pthread_mutex_lock(&m->watch.state_lock);
  if (file && m->watch.write_state) m->watch.write_state(m, file);
  else if (file) fputs("the manager is being closed, and no longer read\n", file);
  pthread_mutex_unlock(&m->watch.state_lock);
  if (!file || fclose(file)) {
    free(text);
    m->config.log_fn(m->config.log_user, GEMINI_LOG_WARNING, "watchdog: state: there is no memory for its text");
    return;
  }
  for (char *rest = text, *at; (at = strsep(&rest, "\n"));) {
    if (!*at) continue;
    snprintf(line, sizeof line, "watchdog: state: %s", at);
    m->config.log_fn(m->config.log_user, GEMINI_LOG_WARNING, line);
  }
  free(text);
}

static void *watchdog(void *user) {
  gmi_manager_t *m = user;
  gmi_watch_t *watch = &m->watch;
  const uint64_t limit = m->config.watchdog_ns;
  const uint64_t period = limit / 4 < PERIOD_LEAST_NS  ? PERIOD_LEAST_NS
                          : limit / 4 > PERIOD_MOST_NS ? PERIOD_MOST_NS
                                                       : limit / 4;
  pthread_mutex_lock(&watch->lock);
  while (!watch->stop) {
    uint64_t at = gmi_now_ns() + period;
    struct timespec until = { (time_t)(at / 1000000000), (long)(at % 1000000000) };
    pthread_cond_timedwait(&watch->stopped, &watch->lock, &until);
    static const char prefix[] = "watchdog: ";
    char texts[TOLD_AT_ONCE][sizeof prefix + 2 * LINE];
    uint32_t count = 0;
    bool first = false; /* a wait is reported for the first time */
    uint64_t now = gmi_now_ns();
    for (gmi_wait_t *c = watch->first; c && count < TOLD_AT_ONCE && !watch->stop; c = c->next) {
      uint64_t waited = now - c->since_ns;
      if (waited < limit || (c->told_ns && waited < 2 * c->told_ns))
        continue; /* reports at limit, 2 limit, 4 limit... */
      first = first || !c->told_ns;
      c->told_ns = waited;
      memcpy(texts[count], prefix, sizeof prefix);
      describe_wait(m, c, now, texts[count++] + sizeof prefix - 1);
    }
    if (!count) continue;
    pthread_mutex_unlock(&watch->lock); /* the log callback may call the library, which takes the lock for its waits */
    for (uint32_t i = 0; i < count; i++) m->config.log_fn(m->config.log_user, GEMINI_LOG_WARNING, texts[i]);
    if (first) log_state(m); /* behind what does not depend on it */
    pthread_mutex_lock(&watch->lock);
  }
  pthread_mutex_unlock(&watch->lock);
  return NULL;
}

void gmi_watch_init(gmi_manager_t *m) {
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&m->watch.stopped, &monotonic);
  pthread_condattr_destroy(&monotonic);
  pthread_mutex_init(&m->watch.lock, NULL);
  pthread_mutex_init(&m->watch.state_lock, NULL);
}

gemini_status_t gmi_watchdog_start(gmi_manager_t *m, void (*write_state)(gmi_manager_t *m, FILE *file)) {
  if (!m->config.watchdog_ns) return GEMINI_OK;
  m->watch.write_state = write_state;
  int error = gmi_thread_start(&m->watch.thread, watchdog, m);
  m->watch.runs = !error;
  return error ? gmi_fail(GEMINI_ERR_OOM_SYSTEM, error, "could not start the watchdog's thread") : GEMINI_OK;
}

void gmi_watchdog_blind(gmi_manager_t *m) {
  pthread_mutex_lock(&m->watch.state_lock);
  m->watch.write_state = NULL;
  pthread_mutex_unlock(&m->watch.state_lock);
}

void gmi_watchdog_stop(gmi_manager_t *m) {
  if (!m->watch.runs) return;
  pthread_mutex_lock(&m->watch.lock);
  m->watch.stop = true;
  pthread_cond_signal(&m->watch.stopped);
  pthread_mutex_unlock(&m->watch.lock);
  pthread_join(m->watch.thread, NULL);
  m->watch.runs = false;
}

void gmi_watch_destroy(gmi_manager_t *m) {
  pthread_cond_destroy(&m->watch.stopped);
  pthread_mutex_destroy(&m->watch.lock);
  pthread_mutex_destroy(&m->watch.state_lock);
}

/* ---- for the dump */
static bool someone_waits_with_lock(const gmi_watch_t *watch) {
  for (const gmi_wait_t *c = watch->first; c; c = c->next)
    if (c->has_lock) return true;
  return false;
}

/* A dump must not block on a manager that hangs. The records can be read without the lock while its holder is in a
 * wait: it made the records consistent before gmi_wait_begin(), which also published them through watch.lock, and it
 * cannot leave gmi_wait_end() while this thread holds watch.lock. If the holder is computing instead, it is likely to
 * unlock or to wait soon: hence a few attempts. */
gmi_reading_t gmi_reading_begin(gmi_manager_t *m) {
  for (int look = 0; look < LOOKS; look++) {
    if (look) nanosleep(&(struct timespec){ 0, LOOK_PAUSE_NS }, NULL);
    if (gmi_lock_try(m)) return GMI_READING_LOCKED;
    pthread_mutex_lock(&m->watch.lock);
    if (someone_waits_with_lock(&m->watch)) return GMI_READING_FROZEN;
    pthread_mutex_unlock(&m->watch.lock);
  }
  return GMI_READING_NOT;
}

void gmi_reading_end(gmi_manager_t *m, gmi_reading_t reading) {
  if (reading == GMI_READING_LOCKED) gmi_unlock_quietly(m);
  if (reading == GMI_READING_FROZEN) pthread_mutex_unlock(&m->watch.lock);
}

void gmi_watch_write_holder(gmi_manager_t *m, FILE *file) {
  char thread[THREAD_TEXT];
  name_thread(holder_thread(m), thread);
  const char *holder = atomic_load_explicit(&m->watch.holder, memory_order_relaxed);
  fprintf(file, "%s() of thread %s", holder ? holder : "?", thread);
}

/* A frozen reading holds watch.lock already. */
void gmi_watch_write_waits(gmi_manager_t *m, gmi_reading_t reading, FILE *file) {
  uint64_t now = gmi_now_ns();
  char text[2 * LINE];
  if (reading != GMI_READING_FROZEN) pthread_mutex_lock(&m->watch.lock);
  if (!m->watch.first) fprintf(file, "waits: none\n");
  for (const gmi_wait_t *c = m->watch.first; c; c = c->next) {
    describe_wait(m, c, now, text);
    fprintf(file, "waits: %s\n", text);
  }
  if (reading != GMI_READING_FROZEN) pthread_mutex_unlock(&m->watch.lock);
}

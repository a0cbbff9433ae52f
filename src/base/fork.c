/* The library's fork handlers: locks of static storage, and descriptors that a child must close.
 * SPDX-License-Identifier: Apache-2.0
 *
 * fork() runs prepare() on the forking thread: the watchers take their locks, then `held` and `lock` are taken. While
 * all of them are held, no other thread is inside a critical section, so the child inherits none half done. parent()
 * releases them in reverse order. child() initialises them anew instead: a recursive mutex compares its owner's thread
 * id when it is unlocked, and that id is another one in the child.
 *
 * Lock order: locks of watchers, held, lock. */
#include "base/fork.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

enum { WATCHERS = 8 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* Guards what follows; the last lock that fork() takes */
/* Held by a thread between gmi_fork_hold() and gmi_fork_let(), which keeps fork() waiting. Recursive, as these nest. */
static pthread_mutex_t held = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static const gmi_fork_ops_t *watchers[WATCHERS];
static uint32_t watcher_count;
static int *fds; /* [fd_capacity]; -1: an unused entry */
static uint32_t fd_capacity;

/* `held` and `lock` are released while watchers are prepared: a thread may call gmi_fork_close() while it holds a
 * watcher's lock, so waiting for that lock with them held could deadlock. Watchers that are registered meanwhile are
 * prepared in another round, so that parent() and child() find all of them prepared. */
static void prepare(void) {
  for (uint32_t done = 0;;) {
    pthread_mutex_lock(&held);
    pthread_mutex_lock(&lock);
    uint32_t count = watcher_count;
    if (done == count) return;
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&held);
    for (; done < count; done++) watchers[done]->prepare();
  }
}

static void parent(void) {
  uint32_t count = watcher_count;
  pthread_mutex_unlock(&lock);
  pthread_mutex_unlock(&held);
  for (uint32_t i = count; i-- > 0;) watchers[i]->parent();
}

static void child(void) {
  pthread_mutex_init(&lock, NULL);
  held = (pthread_mutex_t)PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
  for (uint32_t i = 0; i < fd_capacity; i++) {
    if (fds[i] >= 0) close(fds[i]);
    fds[i] = -1;
  }
  for (uint32_t i = watcher_count; i-- > 0;) watchers[i]->child();
}

void gmi_fork_watch(const gmi_fork_ops_t *ops) {
  pthread_mutex_lock(&lock);
  uint32_t i = 0;
  while (i < watcher_count && watchers[i] != ops) i++;
  if (i == WATCHERS) abort(); /* left out, it would let a child inherit a lock half taken: make WATCHERS larger */
  if (i == watcher_count) {
    if (!i) pthread_atfork(prepare, parent, child);
    watchers[i] = ops;
    watcher_count++;
  }
  pthread_mutex_unlock(&lock);
}

/* Replaces an entry of fds; -1 stands for an unused one. The array grows when a descriptor finds no unused entry. */
static void replace(int from, int to) {
  uint32_t i = 0;
  pthread_mutex_lock(&lock);
  while (i < fd_capacity && fds[i] != from) i++;
  if (i == fd_capacity && from < 0) {
    int *grown = realloc(fds, (fd_capacity + 64) * sizeof *fds);
    for (uint32_t k = 0; grown && k < 64; k++) grown[fd_capacity + k] = -1;
    if (grown) fds = grown, fd_capacity += 64;
  }
  if (i < fd_capacity) fds[i] = to;
  pthread_mutex_unlock(&lock);
}
void gmi_fork_close(int fd) {
  if (fd >= 0) replace(-1, fd);
}
void gmi_fork_close_not(int fd) {
  if (fd >= 0) replace(fd, -1);
}
void gmi_fork_hold(void) { pthread_mutex_lock(&held); }
void gmi_fork_let(void) { pthread_mutex_unlock(&held); }

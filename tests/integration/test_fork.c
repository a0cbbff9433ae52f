/* Processes that fork while managers are open, as data loaders do: a child can have managers of its own, cannot harm
 * its parent's and keeps nothing that the parent's successor needs. SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <time.h>

#include "../fork.h"
#include "../process.h"
#include "../touch.h"
#include "gemini/graph.h"
#include "gemini/hook.h"
#include "gemini/topology.h"
#include "world.h"

enum { W = 65536, DEVICE = GEMINI_TIER_DEVICE, HOST = GEMINI_TIER_HOST, FILES = GEMINI_TIER_FILE };

/* A manager with bytes in every tier. */
typedef struct {
  world_t w;
  gemini_tensor_t t[3];
} model_t;
static model_t model_open(gemini_config_t c, uint64_t seed) {
  model_t k = { .w = world_open(c) };
  gemini_arena_t arena = world_arena(&k.w, GEMINI_KIND_OTHER, 1, "main", 0, 0);
  for (int i = 0; i < 3; i++) {
    char name[16];
    snprintf(name, sizeof name, "t %d", i);
    k.t[i] = world_tensor(&k.w, arena, name, 2 * W);
    world_fill(&k.w, k.t[i], 0, 2 * W, HOST, seed + (uint64_t)i);
    gemini_access_t a = world_whole(k.t[i], GEMINI_READ, (uint32_t)i);
    CHECK_OK(gemini_move(k.w.mgr, &a, 1));
  }
  return k;
}
static void model_close(model_t *k, uint64_t seed) {
  for (int i = 0; i < 3; i++) CHECK(world_holds(&k->w, k->t[i], 0, 2 * W, seed + (uint64_t)i));
  world_close(&k->w);
}

/* The simulated device's memory and the host's are the parent's alone: in a child, touching them faults. */
static void test_a_child_cannot_reach_its_parents_bytes(void) {
  model_t k = model_open(world_config(4, 6, 16), 10);
  gemini_access_t a[2] = { world_whole(k.t[0], GEMINI_READ_WRITE, DEVICE),
                           world_whole(k.t[1], GEMINI_READ_WRITE, HOST) };
  CHECK_OK(gemini_acquire(k.w.mgr, a, 2, k.w.stream));
  CHECK_OK(gemini_stream_synchronize(k.w.mgr, k.w.stream));
  for (int i = 0; i < 2; i++) CHECK(touch_reads(a[i].ptr));
  pid_t child = fork_child();
  if (!child) {
    for (int i = 0; i < 2; i++) CHECK(touch_faults(a[i].ptr));
    _exit(0);
  }
  fork_expect_end(child);
  CHECK_OK(gemini_release(k.w.mgr, a, 2, k.w.stream));
  model_close(&k, 10);
}

#ifndef __SANITIZE_THREAD__
static void log_is_empty(void *user, int32_t level, const char *message) {
  (void)user;
  fprintf(stderr, "log %d: %s\n", (int)level, message);
  exit(1);
}
#endif
/* A framework's allocator in a child: what it frees of the parent's is the parent's, and it gets nothing. */
static void test_a_childs_hooks_leave_the_parents_memory(void) {
  model_t k = model_open(world_config(4, 6, 16), 10);
  CHECK_OK(gemini_hook_set(k.w.mgr, 0));
  void *p = gemini_torch_malloc(1000, 0, NULL), *q = gemini_torch_malloc(1000, 0, NULL);
  CHECK(p && q);
  uint64_t used = world_stats(&k.w).nonmodel_bytes;
  CHECK(used);
  pid_t child = fork_child();
  if (!child) {
    CHECK(!gemini_torch_malloc(1000, 0, NULL));
    CHECK_EQ(world_error().status, GEMINI_ERR_STATE);           /* nobody serves the device */
    CHECK_EQ(gemini_manager_close(k.w.mgr), GEMINI_ERR_HANDLE); /* a record to look for */
    gemini_torch_free(p, 1000, 0, NULL);
    CHECK_EQ(world_error().status, GEMINI_ERR_HANDLE);
#ifndef __SANITIZE_THREAD__                    /* which cannot follow the threads of a child's own */
    gemini_config_t c = world_config(4, 6, 0); /* and when it has a manager for its own allocations */
    c.log_fn = log_is_empty;
    world_t mine = world_open(c);
    CHECK_OK(gemini_hook_set(mine.mgr, 0));
    gemini_torch_free(q, 1000, 0, NULL);
    CHECK_EQ(world_error().status, GEMINI_ERR_HANDLE);
    void *own = gemini_torch_malloc(1000, 0, NULL);
    CHECK(own);
    gemini_torch_free(p, 1000, 0, NULL);
    gemini_torch_free(q, 1000, 0, NULL);
    CHECK_EQ(world_error().status, GEMINI_ERR_HANDLE);
    CHECK(world_stats(&mine).nonmodel_bytes);
    gemini_torch_free(own, 1000, 0, NULL);
    CHECK_EQ(world_stats(&mine).nonmodel_bytes, 0);
    world_close(&mine);
#endif
    _exit(0);
  }
  fork_expect_end(child);
  CHECK_EQ(world_stats(&k.w).nonmodel_bytes, used);
  gemini_torch_free(p, 1000, 0, NULL);
  gemini_torch_free(q, 1000, 0, NULL);
  CHECK_EQ(world_stats(&k.w).nonmodel_bytes, 0);
  model_close(&k, 10);
}

/* Of what the parent has open, nothing that is the library's is open in a child. */
static void test_a_child_has_none_of_the_parents_descriptors(void) {
  int before = process_now().fds;
  model_t k = model_open(world_config(4, 6, 16), 10);
  int with = process_now().fds;
  CHECK(with > before);
  pid_t child = fork_child();
  if (!child) {
    CHECK_EQ(process_now().fds, before);
    _exit(0);
  }
  fork_expect_end(child);
  CHECK_EQ(process_now().fds, with);
  model_close(&k, 10);
  process_check((process_t){ before, process_now().threads });
  int mine[2]; /* of the numbers that were the library's */
  CHECK_EQ(pipe(mine), 0);
  child = fork_child();
  if (!child) {
    CHECK_EQ(write(mine[1], "x", 1), 1);
    _exit(0);
  }
  fork_expect_end(child);
  char byte;
  CHECK_EQ(read(mine[0], &byte, 1), 1);
  close(mine[0]), close(mine[1]);
}

#ifndef __SANITIZE_THREAD__
/* Both sorts of the C library, one of which sorts an arena's tensors: a thread that asks for it stays in it. */
static _Thread_local bool stays;
static atomic_bool sorting, may_go;
typedef int compare_t(const void *a, const void *b, void *user);
void qsort_r(void *base, size_t count, size_t size, compare_t *compare, void *user) {
  while (stays && !atomic_load(&may_go)) {
    atomic_store(&sorting, true);
    nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
  }
  char *bytes = base, one[64];
  CHECK(size <= sizeof one);
  for (size_t i = 1; i < count; i++) {
    size_t to = i;
    while (to && compare(bytes + (to - 1) * size, bytes + i * size, user) > 0) to--;
    memcpy(one, bytes + i * size, size);
    memmove(bytes + (to + 1) * size, bytes + to * size, (i - to) * size);
    memcpy(bytes + to * size, one, size);
  }
}
static int without_user(const void *a, const void *b, void *user) {
  return (*(int (**)(const void *, const void *))user)(a, b);
}
void qsort(void *base, size_t count, size_t size, int (*compare)(const void *a, const void *b)) {
  qsort_r(base, count, size, without_user, &compare);
}

/* Tensors that are not registered in the order in which they lie are sorted when a range of theirs is read into. */
static void sort_tensors(const world_t *w, gemini_arena_t arena) {
  gemini_tensor_t tensor;
  uint64_t at;
  CHECK_OK(gemini_arena_take(w->mgr, arena, 1024, &at));
  for (uint64_t i = 0; i < 4; i++) {
    char name[16];
    snprintf(name, sizeof name, "%d", (int)i);
    CHECK_OK(gemini_tensor_register(w->mgr, arena, name, 256, at + (3 - i) * 256, &tensor));
  }
  FILE *file = tmpfile();
  CHECK(file && !ftruncate(fileno(file), 256));
  gemini_access_t a = world_whole(tensor, 0, 0);
  CHECK_OK(gemini_load(w->mgr, &a, fileno(file), 0));
  fclose(file);
}
static void *sort_and_stay(void *user) {
  const world_t *w = user;
  stays = true;
  sort_tensors(w, world_arena(w, GEMINI_KIND_OTHER, 1, "sorted", 0, 0));
  return NULL;
}
static void test_a_child_sorts_while_a_thread_of_its_parents_does(void) {
  world_t w = world_open(world_config(4, 6, 0));
  pthread_t thread;
  CHECK_EQ(pthread_create(&thread, NULL, sort_and_stay, &w), 0);
  while (!atomic_load(&sorting)) nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
  pid_t child = fork_child();
  if (!child) {
    alarm(300);
    world_t mine = world_open(world_config(4, 6, 0));
    sort_tensors(&mine, world_arena(&mine, GEMINI_KIND_OTHER, 1, "sorted", 0, 0));
    world_close(&mine);
    _exit(0);
  }
  int end;
  CHECK_EQ(waitpid(child, &end, 0), child);
  atomic_store(&may_go, true);
  CHECK_EQ(pthread_join(thread, NULL), 0);
  CHECK_EQ(end, 0); /* not of the alarm */
  world_close(&w);
}

/* A handle of another process's manager is refused with that process's number, whatever was opened since. */
static void expect_refusal(gemini_manager_t mgr, pid_t process) {
  char says[80];
  snprintf(says, sizeof says, "belongs to a manager of process %ld,", (long)process);
  CHECK_EQ(gemini_iteration_begin(mgr), GEMINI_ERR_HANDLE);
  CHECK_SAYS(world_error().message, says);
}
static void test_a_child_and_its_child_have_managers_of_their_own(void) {
  world_t other = world_open(world_config(2, 2, 0));
  model_t k = model_open(world_config(4, 6, 16), 10);
  const pid_t parent = getpid();
  pid_t child = fork_child();
  if (!child) {
    expect_refusal(k.w.mgr, parent);
    model_t mine = model_open(world_config(4, 6, 16), 50); /* in the place of the other one */
    figures_t stats = world_stats(&mine.w);
    CHECK(stats.used_bytes[DEVICE] && stats.used_bytes[HOST] && stats.used_bytes[FILES]);
    CHECK_EQ(gemini_manager_close(k.w.mgr), GEMINI_ERR_HANDLE);
    expect_refusal(k.w.mgr, parent);
    const pid_t middle = getpid();
    pid_t grandchild = fork_child();
    if (!grandchild) {
      model_t its = model_open(world_config(4, 6, 16), 90);
      CHECK_EQ(gemini_manager_close(mine.w.mgr), GEMINI_ERR_HANDLE);
      expect_refusal(k.w.mgr, parent);
      expect_refusal(mine.w.mgr, middle);
      model_close(&its, 90);
      _exit(0);
    }
    fork_expect_end(grandchild);
    model_close(&mine, 50);
    _exit(0);
  }
  fork_expect_end(child);
  model_close(&k, 10);
  world_close(&other);
}

/* The checkpoint files of a trainer that was killed are free, though a worker which it forked lives on. */
static void checkpoint_and_be_killed(uint32_t engine) {
  char dir[64];
  dir_make(dir);
  gemini_config_t c = world_config(4, 6, 40);
  c.file_dir = dir;
  c.checkpoint_name = "run";
  c.file_engine = engine;
  int told[2], worker_told[2]; /* the trainer's checkpoint is made; the worker may end */
  CHECK_EQ(pipe(told), 0);
  CHECK_EQ(pipe(worker_told), 0);
  pid_t trainer = fork_child();
  if (!trainer) {
    model_t k = model_open(c, 10);
    CHECK_OK(gemini_checkpoint(k.w.mgr));
    pid_t worker = fork_child();
    if (!worker) {
      char byte;
      CHECK_EQ(close(worker_told[1]), 0);
      CHECK_EQ(write(told[1], "w", 1), 1);
      CHECK_EQ(read(worker_told[0], &byte, 1), 0); /* ends with the test */
      CHECK_EQ(write(told[1], "w", 1), 1);
      _exit(0);
    }
    CHECK_EQ(write(told[1], "t", 1), 1);
    for (;;) pause();
  }
  char bytes[2];
  for (int i = 0; i < 2; i++) CHECK_EQ(read(told[0], &bytes[i], 1), 1);
  CHECK_EQ(kill(trainer, SIGKILL), 0);
  CHECK_EQ(waitpid(trainer, NULL, 0), trainer);
  model_t k = { .w = world_open(c) }; /* GEMINI_ERR_BUSY if anybody had the files */
  gemini_arena_t arena = world_arena(&k.w, GEMINI_KIND_OTHER, 1, "main", 0, 0);
  for (int i = 0; i < 3; i++) {
    char name[16];
    snprintf(name, sizeof name, "t %d", i);
    k.t[i] = world_tensor(&k.w, arena, name, 2 * W);
  }
  CHECK_OK(gemini_resume(k.w.mgr));
  model_close(&k, 10);
  CHECK_EQ(close(worker_told[0]) | close(worker_told[1]), 0);
  CHECK_EQ(read(told[0], bytes, 1), 1); /* it had lived all the time */
  CHECK_EQ(close(told[0]) | close(told[1]), 0);
  DIR *d = opendir(dir);
  CHECK(d);
  for (struct dirent *e; (e = readdir(d));) {
    char path[400];
    snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
    if (*e->d_name != '.') CHECK_EQ(unlink(path), 0);
  }
  closedir(d);
  CHECK_EQ(rmdir(dir), 0);
}
static void test_kept_files_of_a_killed_trainer_are_free(void) {
  checkpoint_and_be_killed(GEMINI_FILE_ENGINE_THREADS);
  checkpoint_and_be_killed(GEMINI_FILE_ENGINE_AUTO);
}

#ifndef __SANITIZE_ADDRESS__ /* whose allocator leaves a child the locks that other threads held at the fork */
/* Forks at any moment of other threads' work: a child neither hangs on a lock that was held, nor finds anything in the
 * middle of a change that it needs. */
static atomic_bool stop;
static void *work_on_one(void *user) {
  model_t *k = user;
  for (uint64_t i = 0; !atomic_load(&stop); i++) {
    gemini_access_t a = world_whole(k->t[i % 3], GEMINI_READ, i % 2 ? HOST : DEVICE);
    CHECK_OK(gemini_acquire(k->w.mgr, &a, 1, k->w.stream));
    CHECK_OK(gemini_release(k->w.mgr, &a, 1, k->w.stream));
    if (i % 5 == 0) {
      a = world_whole(k->t[i % 3], GEMINI_READ, FILES);
      gemini_status_t status = gemini_move(k->w.mgr, &a, 1);
      CHECK(status == GEMINI_OK || status == GEMINI_ERR_BUSY);
    }
  }
  return NULL;
}
static void *open_and_close(void *user) {
  while (!atomic_load(&stop)) {
    world_t w = world_open(world_config(2, 2, 4));
    world_close(&w);
  }
  return user;
}
static void test_forks_at_any_moment_of_other_threads(void) {
  model_t k = model_open(world_config(4, 6, 16), 10);
  pthread_t threads[3];
  atomic_store(&stop, false);
  CHECK_EQ(pthread_create(&threads[0], NULL, work_on_one, &k), 0);
  CHECK_EQ(pthread_create(&threads[1], NULL, open_and_close, NULL), 0);
  CHECK_EQ(pthread_create(&threads[2], NULL, open_and_close, NULL), 0);
  for (int i = 0; i < 40; i++) {
    pid_t child = fork_child();
    if (!child) {
      CHECK_EQ(gemini_iteration_begin(k.w.mgr), GEMINI_ERR_HANDLE);
      model_t mine = model_open(world_config(4, 6, 16), 50);
      model_close(&mine, 50);
      _exit(0);
    }
    fork_expect_end(child);
  }
  atomic_store(&stop, true);
  for (int i = 0; i < 3; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
  model_close(&k, 10);
}
#endif
#endif

int main(void) {
  process_begin();
  RUN(test_a_child_cannot_reach_its_parents_bytes);
  RUN(test_a_childs_hooks_leave_the_parents_memory);
  RUN(test_a_child_has_none_of_the_parents_descriptors);
#ifndef __SANITIZE_THREAD__
  RUN(test_a_child_sorts_while_a_thread_of_its_parents_does);
  RUN(test_a_child_and_its_child_have_managers_of_their_own);
  RUN(test_kept_files_of_a_killed_trainer_are_free);
#ifndef __SANITIZE_ADDRESS__
  RUN(test_forks_at_any_moment_of_other_threads);
#endif
#endif
  return check_done();
}

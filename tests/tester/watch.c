/* Runs programs in child processes, notices crashes, hangs and leaks, and shrinks programs.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "watch.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LEAK_CODE = 23 }; /* exit status of LeakSanitizer */

static void *fail_setup(const char *what) {
  perror(what);
  exit(2);
}
static shared_t *shared_map(int fd) {
  struct stat info;
  if (fstat(fd, &info)) return fail_setup("fstat");
  void *space = mmap(NULL, (size_t)info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return space == MAP_FAILED ? fail_setup("mmap") : space;
}
watch_t watch_new(uint32_t threads, uint64_t log_capacity) {
  watch_t w = { .fd = memfd_create("tester", 0) };
  if (w.fd < 0 || ftruncate(w.fd, (off_t)(sizeof *w.shared + (threads + 1) * log_capacity * sizeof(op_t))))
    fail_setup("memfd_create");
  w.shared = shared_map(w.fd);
  w.shared->log_capacity = log_capacity;
  return w;
}

/* ---- a folder for the child's files, removed when the child has ended */
static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *at) {
  (void)info, (void)kind, (void)at;
  return remove(path);
}
static void folder_new(char path[PATHS]) {
  const char *tmp = getenv("TMPDIR");
  snprintf(path, PATHS, "%.80s/gemini-tester.XXXXXX", tmp && *tmp ? tmp : "/tmp");
  if (!mkdtemp(path)) {
    perror(path);
    exit(2);
  }
}

int child_main(int fd) {
  shared_t *s = shared_map(fd);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (s->quiet && (!freopen("/dev/null", "w", stderr) || !freopen("/dev/null", "w", stdout))) return 2;
  world_t *w = calloc(1, sizeof *w);
  if (!w) return 2;
  world_open(w, &s->options, s, s->directory);
  if (s->replays) world_replay(w, shared_program(s), s->replay_count);
  else world_run(w);
  world_close(w);
  free(w);
  return 0; /* at exit, the sanitizer looks for leaks */
}

/* Starts the program anew with exec(): after a plain fork, ThreadSanitizer believes that locks of other libraries are
 * held. */
static pid_t child_start(int fd) {
  char number[16];
  char *const arguments[] = { "tester", "--child", number, NULL };
  pid_t pid;
  snprintf(number, sizeof number, "%d", fd);
  fflush(NULL);
  int error = posix_spawn(&pid, "/proc/self/exe", NULL, NULL, arguments, environ);
  if (error) errno = error, fail_setup("posix_spawn");
  return pid;
}

/* Appends what each thread was doing. */
static void tell_calls(const shared_t *s, const options_t *o, pid_t pid, char *to, size_t size) {
  uint64_t now = now_ns();
  for (uint32_t t = 0; t < o->threads; t++) {
    uint32_t calls = atomic_load(&s->threads[t].calls);
    snprintf(to + strlen(to), size - strlen(to), "  thread %u, last calls:", t);
    for (uint32_t i = calls > 4 ? calls - 4 : 0; i < calls; i++) {
      const last_call_t *c = &s->threads[t].last[i % LAST_CALLS];
      snprintf(to + strlen(to), size - strlen(to), " %s()", c->name);
      if (!atomic_load(&c->end_ns))
        snprintf(to + strlen(to), size - strlen(to), " for %.0f s", (double)(now - atomic_load(&c->begin_ns)) * 1e-9);
    }
    snprintf(to + strlen(to), size - strlen(to), "\n");
  }
  if (getenv("GEMINI_TESTER_GDB")) { /* the backtraces of all threads, by a debugger */
    char command[128];
    snprintf(command, sizeof command, "gdb -p %d -batch -ex 'thread apply all bt 12' 2>/dev/null >&2", (int)pid);
    if (system(command)) fprintf(stderr, "no gdb\n");
  }
}

outcome_t run_child(const options_t *options, watch_t watch, const op_t *ops, uint64_t count, bool quiet) {
  outcome_t o = { .kind = ENDED_WELL };
  shared_t *shared = watch.shared;
  folder_new(shared->directory);
  shared->options = *options;
  shared->quiet = quiet;
  shared->replays = ops != NULL;
  shared->replay_count = count;
  if (ops) memcpy(shared_program(shared), ops, count * sizeof *ops);
  shared->failed = 0;
  shared->site_failed = false;
  shared->message[0] = 0;
  for (uint32_t i = 0; i < options->threads; i++) {
    shared->threads[i].count = 0;
    shared->threads[i].calls = 0;
  }
  uint64_t begin = now_ns(), progress = begin, steps = atomic_load(&shared->steps);
  pid_t pid = child_start(watch.fd);
  int status = 0;
  uint64_t pause_ns = 200000;
  for (;;) {
    pid_t ended = waitpid(pid, &status, WNOHANG);
    if (ended == pid) break;
    nanosleep(&(struct timespec){ 0, (long)pause_ns }, NULL);
    if (pause_ns < 20000000) pause_ns *= 2;
    if (atomic_load(&shared->steps) != steps) {
      steps = atomic_load(&shared->steps);
      progress = now_ns();
    }
    if (now_ns() - progress < (uint64_t)options->hang_s * 1000000000u) continue;
    o.kind = ENDED_HANGING;
    snprintf(o.message, sizeof o.message, "nothing has moved for %u s\n", options->hang_s);
    tell_calls(shared, options, pid, o.message, sizeof o.message);
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    break;
  }
  o.seconds = (double)(now_ns() - begin) * 1e-9;
  if (o.kind != ENDED_HANGING) {
    if (WIFSIGNALED(status)) o.kind = ENDED_BY_SIGNAL, o.signal = WTERMSIG(status);
    else if (WEXITSTATUS(status) == LEAK_CODE) o.kind = ENDED_LEAKING;
    else if (WEXITSTATUS(status)) o.kind = ENDED_DIFFERENT, o.code = WEXITSTATUS(status);
    if (shared->failed) o.kind = ENDED_DIFFERENT, o.code = 0, memcpy(o.message, shared->message, sizeof o.message);
    else if (o.kind != ENDED_WELL) tell_calls(shared, options, pid, o.message, sizeof o.message);
  }
  nftw(shared->directory, remove_one, 16, FTW_DEPTH | FTW_PHYS);
  return o;
}

const char *end_words(const outcome_t *o) {
  static char text[64];
  switch (o->kind) {
  case ENDED_WELL: return "ended well";
  case ENDED_DIFFERENT: return !o->code ? "differs" : "ended with an error (a sanitizer's report is above)";
  case ENDED_HANGING: return "hangs";
  case ENDED_LEAKING: return "leaks";
  default: snprintf(text, sizeof text, "was ended by signal %d (%s)", o->signal, strsignal(o->signal)); return text;
  }
}

op_t *program_of(shared_t *s, const options_t *o, uint64_t *count_out) {
  uint64_t total = 0, count = 0;
  for (uint32_t t = 0; t < o->threads; t++) total += atomic_load(&s->threads[t].count);
  op_t *ops = calloc(total + 1, sizeof *ops);
  if (!ops) exit(2);
  uint64_t at[THREADS] = { 0 };
  for (uint32_t round = 0; count < total && round < 65536; round++)
    for (uint32_t t = 0; t < o->threads; t++) {
      uint64_t end = atomic_load(&s->threads[t].count);
      if (end > s->log_capacity) end = s->log_capacity;
      while (at[t] < end && (shared_log(s, t)[at[t]].round == round || o->threads == 1))
        ops[count++] = shared_log(s, t)[at[t]++];
    }
  *count_out = count;
  return ops;
}

/* ---- shrinking: delta debugging, every attempt in a child */
typedef struct shrinker {
  options_t options;
  watch_t watch;
  const outcome_t *like;
  uint64_t end_ns;
  uint32_t attempts, tries; /* tries: runs of each attempt, as threads interleave differently each time */
} shrinker_t;

/* Did both end in the same way? For differences: with the same first words. */
static bool alike(const outcome_t *a, const outcome_t *b) {
  if (a->kind != b->kind || a->signal != b->signal) return false;
  if (a->kind != ENDED_DIFFERENT) return true;
  size_t n = strcspn(a->message, "0123456789\n"); /* numbers may differ */
  return n && n == strcspn(b->message, "0123456789\n") && !memcmp(a->message, b->message, n);
}

static bool still_fails(shrinker_t *s, const op_t *ops, uint64_t count) {
  for (uint32_t i = 0; i < s->tries; i++) {
    if (now_ns() > s->end_ns) return false;
    s->attempts++;
    outcome_t o = run_child(&s->options, s->watch, ops, count, true);
    if (alike(&o, s->like)) return true;
  }
  return false;
}

op_t *shrink(const options_t *options, const op_t *ops, uint64_t *count, const outcome_t *like, uint32_t seconds) {
  shrinker_t s = { .options = *options, .like = like, .end_ns = now_ns() + (uint64_t)seconds * 1000000000u };
  s.tries = options->tries ? options->tries : options->threads > 1 ? 10 : 2;
  s.options.hang_s = like->kind == ENDED_HANGING ? 3 : options->hang_s;
  s.watch = watch_new(options->threads, *count + 16);
  uint64_t n = *count;
  op_t *best = malloc((n + 1) * sizeof *best), *next = malloc((n + 1) * sizeof *next);
  memcpy(best, ops, n * sizeof *best);
  for (uint64_t size = n / 2 ? n / 2 : 1;;) {
    bool any = false;
    for (uint64_t from = n > size ? n - size : 0;; from = from > size ? from - size : 0) {
      uint64_t end = from + size < n ? from + size : n;
      memcpy(next, best, from * sizeof *next);
      memcpy(next + from, best + end, (n - end) * sizeof *next);
      if (end > from && still_fails(&s, next, n - (end - from))) {
        n -= end - from;
        memcpy(best, next, n * sizeof *best);
        any = true;
      }
      if (!from || now_ns() > s.end_ns) break;
    }
    if (now_ns() > s.end_ns || (size == 1 && !any)) break;
    if (size > 1) size /= 2;
  }
  /* Then makes operations simpler: without the fault, with fewer accesses, with smaller numbers. */
  for (uint64_t i = 0; i < n && now_ns() < s.end_ns; i++) {
    op_t kept = best[i];
    if (kept.fault) {
      best[i].fault = 0;
      if (!still_fails(&s, best, n)) best[i] = kept;
    }
    uint32_t unit = kept.code == OP_acquire   ? ACCESS_ARGS
                    : kept.code == OP_release ? 1
                    : kept.code == OP_update  ? 2
                                              : 0;
    uint32_t first = kept.code == OP_acquire ? 2 : kept.code == OP_release ? 3 : 5;
    for (uint32_t k = first; unit && k + unit <= best[i].count && best[i].count > first + unit;) {
      op_t before = best[i];
      memmove(&best[i].arg[k], &best[i].arg[k + unit], (before.count - k - unit) * sizeof *before.arg);
      best[i].count = (uint8_t)(before.count - unit);
      if (still_fails(&s, best, n)) continue;
      best[i] = before;
      k += unit;
    }
  }
  fprintf(stderr, "  shrunk from %llu operations to %llu in %u attempts\n", (unsigned long long)*count,
          (unsigned long long)n, s.attempts);
  free(next);
  close(s.watch.fd);
  *count = n;
  return best;
}

/* What is at an address, in words: when asked, and when an access faults. SPDX-License-Identifier: Apache-2.0 */
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "../fork.h"
#include "gemini/address.h"
#include "world.h"

#define W WORLD_CHUNK
enum { DEVICE = GEMINI_TIER_DEVICE, HOST = GEMINI_TIER_HOST };
enum { READ = GEMINI_READ, WRITE = GEMINI_WRITE, BOTH = GEMINI_READ_WRITE };

/* ---- when asked */
static const char *explain(const world_t *w, const void *address) {
  static char text[4096];
  uint64_t length = 0;
  CHECK_OK(gemini_explain_address(w->mgr, address, sizeof text, text, &length));
  CHECK_EQ(strlen(text), length);
  return text;
}

static void test_explain_tells_arena_tensor_chunk_and_holders(void) {
  world_t w = world_open(world_config(4, 8, 8));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 1, "params", 0, 0);
  gemini_tensor_t first = world_tensor(&w, arena, "first", W), second = world_tensor(&w, arena, "second", 2 * W);
  char *at = (char *)(uintptr_t)world_tensor_info(&w, second).address;
  CHECK_SAYS(explain(&w, at + 5), "arena: params, offset 65541 of the 196608 bytes that are used\n");
  CHECK_SAYS(explain(&w, at + 5), "tensor: second, offset 5 of its 131072 bytes\n");
  CHECK_SAYS(explain(&w, at + 5), "bytes: nothing has been used yet");
  world_fill(&w, second, 0, 2 * W, HOST, 7);
  CHECK_SAYS(explain(&w, at + W + 5), "chunk: 2 of 3, 65536 bytes from 0x");
  CHECK_SAYS(explain(&w, at + W + 5), "bytes: on the host\n");
  CHECK_SAYS(explain(&w, at + W + 5), "acquired: no; it must not be used now\n");
  gemini_access_t away = world_whole(second, READ, GEMINI_TIER_FILE);
  CHECK_OK(gemini_move(w.mgr, &away, 1));
  CHECK_SAYS(explain(&w, at), "bytes: in a file\n");
  CHECK_SAYS(explain(&w, (char *)(uintptr_t)world_tensor_info(&w, first).address), "nowhere: they read as zero\n");

  gemini_access_t a[] = { world_whole(second, BOTH, DEVICE), world_part(second, 0, 64, READ, DEVICE),
                          world_part(arena, W, 6, READ, DEVICE), gemini_address_access(at + 5, 3, READ, DEVICE) };
  CHECK_OK(gemini_acquire(w.mgr, a, 4, w.stream));
  CHECK_SAYS(explain(&w, at + 5), "bytes: on the device\n");
  CHECK_SAYS(explain(&w, at + 5),
             "acquired: 131072 bytes at offset 0 of second, read and written, on the device, 1 times");
  CHECK_SAYS(explain(&w, at + 5), "acquired: 64 bytes at offset 0 of second, read, on the device, 1 times\n");
  CHECK_SAYS(explain(&w, at + 5), "acquired: 6 bytes at offset 65536 of params, read, on the device, 1 times\n");
  CHECK_SAYS(explain(&w, at + 5), "acquired: 3 bytes at offset 65541 of params, read, on the device, 1 times\n");
  CHECK(!strstr(explain(&w, at + 64), " 64 bytes at") && strstr(explain(&w, at + 64), " 131072 bytes at"));
  CHECK(!strstr(explain(&w, at - 1), "acquired: 6") && strstr(explain(&w, at - 1), "acquired: no"));
  CHECK_OK(gemini_release(w.mgr, a, 4, w.stream));
  CHECK_SAYS(explain(&w, at + 5), "acquired: no");
  CHECK_OK(gemini_pin(w.mgr, &a[1]));
  CHECK_SAYS(explain(&w, at + 5), "pinned: ");
  CHECK_OK(gemini_unpin(w.mgr, &a[1]));

  gemini_access_t host = world_whole(second, READ, HOST);
  void *block;
  CHECK_OK(gemini_acquire(w.mgr, &host, 1, w.stream));
  CHECK_SAYS(explain(&w, (char *)host.ptr + W), ", of chunk 2 of arena params\n");
  CHECK_SAYS(explain(&w, at), "on the host, 1 times\n");
  CHECK_OK(gemini_release(w.mgr, &host, 1, w.stream));
  CHECK_OK(gemini_alloc(w.mgr, 100, w.stream, &block));
  CHECK_SAYS(explain(&w, block), "non-model memory");
  CHECK_OK(gemini_free(w.mgr, block, w.stream));
  CHECK_SAYS(explain(&w, &w), "none: no memory of this manager\n");
  CHECK_SAYS(explain(&w, NULL), "none: no memory of this manager\n");
  world_close(&w);
}

static void test_explain_tells_of_gradients_in_their_parameters_bytes(void) {
  world_t w = world_open(world_config(4, 8, 0));
  gemini_arena_t params = world_arena(&w, GEMINI_KIND_PARAM, 2, "params", 0, 0);
  gemini_arena_t grads = world_arena(&w, GEMINI_KIND_GRAD, 2, "grads", 0, params);
  gemini_tensor_t p = world_tensor(&w, params, "p", W), g;
  CHECK_OK(gemini_tensor_counterpart(w.mgr, p, grads, &g));
  gemini_access_t a = world_part(g, 0, 0, WRITE, DEVICE), part = world_part(g, 10, 20, READ, DEVICE);
  CHECK_OK(gemini_acquire(w.mgr, &a, 1, w.stream));
  CHECK_OK(gemini_acquire(w.mgr, &part, 1, w.stream));
  CHECK_SAYS(explain(&w, (char *)a.ptr + 12),
             "acquired: 65536 bytes at offset 0 of p, written, on the device, 1 times\n");
  CHECK_SAYS(explain(&w, (char *)a.ptr + 12), "acquired: 20 bytes at offset 10 of p, read, on the device, 1 times\n");
  CHECK_OK(gemini_release(w.mgr, &part, 1, w.stream));
  CHECK_OK(gemini_release(w.mgr, &a, 1, w.stream));
  world_close(&w);
}

/* ---- when an access faults: in a child, whose stderr and end are looked at */
typedef struct {
  int status;
  char text[4096];
} end_t;
static end_t in_child(void (*run)(void)) {
  int pipe_fds[2];
  CHECK(!pipe(pipe_fds));
  pid_t child = fork_child();
  if (!child) {
    const struct rlimit none = { 0, 0 };
    setrlimit(RLIMIT_CORE, &none);
    dup2(pipe_fds[1], STDERR_FILENO);
    signal(SIGSEGV, SIG_DFL); /* sanitizers have a handler of their own */
    run();
    _exit(0);
  }
  CHECK(!close(pipe_fds[1]));
  end_t end = { 0 };
  size_t length = 0;
  for (ssize_t n; length < sizeof end.text - 1 && (n = read(pipe_fds[0], end.text + length, 1)) > 0;) length++;
  CHECK(!close(pipe_fds[0]));
  CHECK_EQ(waitpid(child, &end.status, 0), child);
  return end;
}
static world_t strict_open(gemini_tensor_t *first, uint8_t **address) {
  gemini_config_t c = world_config(2, 8, 0);
  c.flags = GEMINI_CONFIG_STRICT | GEMINI_CONFIG_EXPLAIN_FAULTS;
  world_t w = world_open(c);
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 1, "params", 0, 0);
  (void)world_tensor(&w, arena, "before", W);
  *first = world_tensor(&w, arena, "first\n", 2 * W);
  *address = (uint8_t *)(uintptr_t)world_tensor_info(&w, *first).address;
  return w;
}
static volatile uint8_t sink;

static void read_what_has_left(void) {
  gemini_tensor_t t;
  uint8_t *address;
  world_t w = strict_open(&t, &address);
  world_fill(&w, t, 0, 2 * W, DEVICE, 3);
  sink = address[W + 8]; /* resident: fine, if not acquired */
  gemini_access_t away = world_whole(t, READ, HOST);
  CHECK_OK(gemini_move(w.mgr, &away, 1));
  sink = address[W + 8];
}
static void write_at(void *user) { *(volatile uint8_t *)user = 1; }
static void write_on_a_stream(void) {
  gemini_tensor_t t;
  uint8_t *address;
  world_t w = strict_open(&t, &address);
  gemini_access_t neighbour = world_part(t, W, W, WRITE, DEVICE);
  CHECK_OK(gemini_acquire(w.mgr, &neighbour, 1, w.stream));
  CHECK_OK(gemini_stream_call(w.mgr, w.stream, write_at, address + W - 1)); /* just before what is acquired */
  CHECK_OK(gemini_stream_synchronize(w.mgr, w.stream));                     /* by the stream's thread */
}
static void write_behind_the_arena(void) {
  gemini_tensor_t t;
  uint8_t *address;
  world_t w = strict_open(&t, &address);
  (void)w;
  write_at(address + 2 * W + 4);
}
static void read_in_a_child(void) {
  gemini_tensor_t t;
  uint8_t *address;
  world_t w = strict_open(&t, &address);
  world_fill(&w, t, 0, 2 * W, DEVICE, 3);
  pid_t child = fork_child();
  if (!child) sink = *address;
  int end = 0;
  CHECK_EQ(waitpid(child, &end, 0), child);
  CHECK(WIFSIGNALED(end) && WTERMSIG(end) == SIGSEGV);
  world_close(&w);
}
static void read_nothing_of_ours(void) {
  gemini_tensor_t t;
  uint8_t *address;
  world_t w = strict_open(&t, &address);
  (void)w;
  uint8_t *theirs = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  sink = *(volatile uint8_t *)theirs;
}
static void be_sent_the_signal(void) {
  gemini_tensor_t t;
  uint8_t *address;
  world_t w = strict_open(&t, &address);
  (void)w;
  kill(getpid(), SIGSEGV);
}

static void test_a_stale_access_says_what_it_was_to(void) {
  const struct {
    void (*run)(void);
    const char *says[3];
  } cases[] = {
    { read_what_has_left,
      { ", offset 131080 of arena params, offset 65544 of tensor first?.",
        " Its chunk 2 is not acquired; its bytes are on the host.\n" } },
    { write_on_a_stream, { ", offset 131071 of arena params", " Its chunk 1 is not acquired; it has no bytes.\n" } },
    { write_behind_the_arena, { ", offset 196612 of arena params. It is beyond what is used of the arena.\n" } },
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    end_t end = in_child(cases[i].run);
    CHECK(WIFSIGNALED(end.status) && WTERMSIG(end.status) == SIGSEGV);
    CHECK(!strncmp(end.text, "libgemini: access to address 0x", 31));
    for (int k = 0; k < 3 && cases[i].says[k]; k++) CHECK_SAYS(end.text, cases[i].says[k]);
  }
  end_t end = in_child(read_in_a_child);
  CHECK(WIFEXITED(end.status) && !WEXITSTATUS(end.status));
  CHECK_SAYS(end.text, "offset 65536 of arena params");
  CHECK_SAYS(end.text, "It belongs to the process that forked this one");
}

static void test_other_faults_are_none_of_the_librarys(void) {
  void (*const runs[])(void) = { read_nothing_of_ours, be_sent_the_signal };
  for (int i = 0; i < 2; i++) {
    end_t end = in_child(runs[i]);
    CHECK(WIFSIGNALED(end.status) && WTERMSIG(end.status) == SIGSEGV);
    CHECK(!*end.text);
  }
}

static void mine(int number, siginfo_t *info, void *context) {
  (void)context;
  static const char text[] = "mine\n";
  if (number == SIGSEGV && info->si_addr && write(STDERR_FILENO, text, sizeof text - 1) > 0) _exit(7);
}
static void plainly_mine(int number) { _exit(number == SIGSEGV ? 8 : 9); }
static void read_with_a_handler(void) {
  struct sigaction action = { .sa_sigaction = mine, .sa_flags = SA_SIGINFO };
  CHECK(!sigaction(SIGSEGV, &action, NULL));
  read_what_has_left();
}
static void read_with_a_plain_handler(void) {
  signal(SIGSEGV, plainly_mine);
  read_what_has_left();
}
static void test_the_handler_that_was_there_before_gets_the_signal(void) {
  end_t end = in_child(read_with_a_handler);
  CHECK(WIFEXITED(end.status) && WEXITSTATUS(end.status) == 7);
  CHECK_SAYS(end.text, "its bytes are on the host.\nmine\n");
  end = in_child(read_with_a_plain_handler);
  CHECK(WIFEXITED(end.status) && WEXITSTATUS(end.status) == 8);
}

static void test_the_handler_goes_with_the_last_manager(void) {
  struct sigaction now, before;
  CHECK(!sigaction(SIGSEGV, NULL, &before));
  gemini_tensor_t t;
  uint8_t *address;
  world_t plain = world_open(world_config(4, 4, 0));
  CHECK(!sigaction(SIGSEGV, NULL, &now) && now.sa_sigaction == before.sa_sigaction);
  world_t w = strict_open(&t, &address), v = strict_open(&t, &address);
  CHECK(!sigaction(SIGSEGV, NULL, &now) && now.sa_sigaction != before.sa_sigaction);
  world_close(&w);
  CHECK(!sigaction(SIGSEGV, NULL, &now) && now.sa_sigaction != before.sa_sigaction);
  world_close(&v);
  CHECK(!sigaction(SIGSEGV, NULL, &now) && now.sa_sigaction == before.sa_sigaction);
  w = strict_open(&t, &address);
  signal(SIGSEGV, plainly_mine); /* installed since: it stays */
  world_close(&w);
  CHECK(!sigaction(SIGSEGV, NULL, &now) && now.sa_handler == plainly_mine);
  CHECK(!sigaction(SIGSEGV, &before, NULL));
  world_close(&plain);
  gemini_config_t c = world_config(4, 4, 0);
  gemini_manager_t mgr;
  c.flags = GEMINI_CONFIG_EXPLAIN_FAULTS, c.device = GEMINI_DEVICE_CUDA;
  CHECK_STATUS(gemini_manager_open(&c, &mgr), GEMINI_ERR_UNSUPPORTED);
  CHECK_SAYS(world_error().message, "GEMINI_CONFIG_EXPLAIN_FAULTS");
}

/* A handler of the program's over ours, which calls the one before it. */
static struct sigaction over_ours;
static volatile sig_atomic_t times;
static void chaining(int number, siginfo_t *info, void *context) {
  if (++times > 1) _exit(9);
  if (write(STDERR_FILENO, "the program's\n", 14) != 14) _exit(8);
  if (over_ours.sa_flags & SA_SIGINFO) over_ours.sa_sigaction(number, info, context);
}
static void read_below_a_handler_that_calls_ours(void) {
  gemini_tensor_t t;
  uint8_t *address;
  world_t w = strict_open(&t, &address);
  struct sigaction action = { .sa_sigaction = chaining, .sa_flags = SA_SIGINFO };
  CHECK(!sigaction(SIGSEGV, &action, &over_ours));
  world_close(&w);
  w = strict_open(&t, &address);
  sink = address[8];
}
static void test_handlers_that_call_each_other_end(void) {
  end_t end = in_child(read_below_a_handler_that_calls_ours);
  CHECK(WIFSIGNALED(end.status) && WTERMSIG(end.status) == SIGSEGV);
  const char *first = strstr(end.text, "libgemini: access to");
  CHECK(first && !strstr(first + 1, "libgemini: access to"));
  CHECK_SAYS(end.text, "the program's\n");
}

int main(void) {
  RUN(test_explain_tells_arena_tensor_chunk_and_holders);
  RUN(test_explain_tells_of_gradients_in_their_parameters_bytes);
  RUN(test_a_stale_access_says_what_it_was_to);
  RUN(test_other_faults_are_none_of_the_librarys);
  RUN(test_the_handler_that_was_there_before_gets_the_signal);
  RUN(test_the_handler_goes_with_the_last_manager);
  RUN(test_handlers_that_call_each_other_end);
  return check_done();
}

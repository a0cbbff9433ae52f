/* Limits on memory, the host tier's reservation, and blocks from it. SPDX-License-Identifier: Apache-2.0 */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../check.h"
#include "base/status.h"
#include "host/host_heap.h"
#include "host/limits.h"
#include "host/reserve.h"
#include "host/topology.h"

#define KIB UINT64_C(1024)
#define MIB (KIB * KIB)
#define GIB (KIB * MIB)
#define NONE GMI_LIMIT_NONE

/* --- a machine made of files --- */

static char tree[64];

static void tree_new(void) {
  snprintf(tree, sizeof tree, "/tmp/gemini_test_XXXXXX");
  CHECK(mkdtemp(tree));
}

static void tree_drop(void) {
  char command[128];
  snprintf(command, sizeof command, "rm -rf '%s'", tree);
  CHECK_EQ(system(command), 0);
}

static void file_put(const char *path, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void file_put(const char *path, const char *format, ...) {
  char full[1024];
  snprintf(full, sizeof full, "%s/%s", tree, path);
  for (char *slash = strchr(full + strlen(tree) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = 0;
    mkdir(full, 0755);
    *slash = '/';
  }
  FILE *file = fopen(full, "w");
  CHECK(file);
  va_list args;
  va_start(args, format);
  vfprintf(file, format, args);
  va_end(args);
  CHECK(!fclose(file));
}

#define VERSION2 "35 31 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
#define VERSION1 "36 31 0:31 / /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory\n"

static void meminfo_put(uint64_t total, uint64_t available) {
  file_put("proc/meminfo",
           "MemTotal:       %" PRIu64 " kB\nMemFree:        100 kB\nMemAvailable:   %" PRIu64 " kB\nBuffers: 1 kB\n",
           total / KIB, available / KIB);
}

/* A cgroup of version 2, directory "" is the mounted one. */
static void cgroup_put(const char *directory, const char *max, const char *high, uint64_t current, uint64_t cache) {
  char path[256];
  snprintf(path, sizeof path, "sys/fs/cgroup%s/memory.max", directory);
  file_put(path, "%s\n", max);
  snprintf(path, sizeof path, "sys/fs/cgroup%s/memory.high", directory);
  file_put(path, "%s\n", high);
  snprintf(path, sizeof path, "sys/fs/cgroup%s/memory.current", directory);
  file_put(path, "%" PRIu64 "\n", current);
  snprintf(path, sizeof path, "sys/fs/cgroup%s/memory.stat", directory);
  file_put(path,
           "anon 12345\nfile %" PRIu64 "\ninactive_anon 777\ninactive_file %" PRIu64 "\nactive_file %" PRIu64
           "\nslab_reclaimable 0\n",
           cache, cache / 4, cache - cache / 4);
}

static gmi_limits_t limits_of(const char *root) {
  gmi_limits_t l;
  CHECK_EQ(gmi_limits_read(root, &l), GEMINI_OK);
  return l;
}

static void expect_limit(const gmi_limit_t *limit, uint64_t bytes, uint64_t used, const char *name) {
  CHECK_EQ(limit->limit_bytes, bytes);
  CHECK_EQ(limit->used_bytes, used);
  CHECK_EQ(limit->free_bytes, used < bytes ? bytes - used : 0);
  if (strcmp(limit->name, name)) fprintf(stderr, "name is \"%s\", expected \"%s\"\n", limit->name, name);
  CHECK(!strcmp(limit->name, name));
}

/* --- limits --- */

static void test_limits_of_an_empty_system_are_none(void) {
  tree_new();
  gmi_limits_t l = limits_of(tree);
  CHECK_EQ(l.memory.limit_bytes, NONE);
  CHECK_EQ(l.memory.free_bytes, NONE);
  CHECK_EQ(l.locked.free_bytes, NONE);
  CHECK_EQ(gmi_limits_default_host_bytes(&l, true), 0);
  CHECK_EQ(gmi_limits_check(&l, "host_bytes", UINT64_MAX, true), GEMINI_OK);
  tree_drop();
}

static void test_limits_take_the_tightest_cgroup_of_the_path(void) {
  tree_new();
  file_put("proc/self/cgroup", "0::/a/b\n");
  file_put("proc/self/mountinfo", "22 1 0:21 / /proc rw - proc proc rw\n" VERSION2);
  meminfo_put(64 * GIB, 60 * GIB);
  cgroup_put("/a/b", "8589934592", "max", 3 * GIB, GIB);
  cgroup_put("/a", "max", "max", 3 * GIB, GIB);
  gmi_limits_t l = limits_of(tree);
  expect_limit(&l.cgroup, 8 * GIB, 2 * GIB, "memory.max of cgroup /a/b");
  expect_limit(&l.memory, 8 * GIB, 2 * GIB, "memory.max of cgroup /a/b");
  expect_limit(&l.available, 64 * GIB, 4 * GIB, "MemAvailable");
  /* A neighbour in the group above has used most of that group's. */
  cgroup_put("/a", "17179869184", "max", 15 * GIB, GIB);
  l = limits_of(tree);
  expect_limit(&l.memory, 16 * GIB, 14 * GIB, "memory.max of cgroup /a");
  /* Beyond memory.high nothing is killed, but everything crawls. */
  cgroup_put("/a/b", "8589934592", "4294967296", 3 * GIB, 0);
  l = limits_of(tree);
  expect_limit(&l.memory, 4 * GIB, 3 * GIB, "memory.high of cgroup /a/b");
  /* The mounted one has limits, too, inside a container. */
  cgroup_put("", "1073741824", "max", GIB / 2, 0);
  l = limits_of(tree);
  expect_limit(&l.memory, GIB, GIB / 2, "memory.max of cgroup /");
  cgroup_put("", "1073741824", "max", 2 * GIB, 0);
  l = limits_of(tree);
  expect_limit(&l.memory, GIB, 2 * GIB, "memory.max of cgroup /");
  CHECK_EQ(l.memory.free_bytes, 0);
  CHECK_EQ(gmi_limits_default_host_bytes(&l, false), 0);
  tree_drop();
}

static void test_limits_count_cache_that_is_more_than_current_as_none(void) {
  tree_new();
  file_put("proc/self/cgroup", "0::/\n");
  file_put("proc/self/mountinfo", VERSION2);
  cgroup_put("", "1073741824", "max", 100 * MIB, 200 * MIB); /* read at two moments */
  gmi_limits_t l = limits_of(tree);
  expect_limit(&l.cgroup, GIB, 0, "memory.max of cgroup /");
  tree_drop();
}

static void test_limits_of_version_1_are_read(void) {
  tree_new();
  file_put("proc/self/cgroup", "9:cpu,cpuacct:/cpu\n4:hugetlb,memory:/jobs/7\n0::/\n");
  file_put("proc/self/mountinfo", "33 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n" VERSION1);
  file_put("sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes", "9223372036854771712\n");
  file_put("sys/fs/cgroup/memory/jobs/7/memory.usage_in_bytes", "1\n");
  file_put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  gmi_limits_t l = limits_of(tree);
  CHECK_EQ(l.cgroup.limit_bytes, NONE);
  file_put("sys/fs/cgroup/memory/jobs/memory.limit_in_bytes", "%" PRIu64 "\n", 10 * GIB);
  file_put("sys/fs/cgroup/memory/jobs/memory.usage_in_bytes", "%" PRIu64 "\n", 5 * GIB);
  file_put("sys/fs/cgroup/memory/jobs/memory.stat", /* the first is of the group alone, without those below it */
           "inactive_file 4\ntotal_inactive_file %" PRIu64 "\ntotal_active_file %" PRIu64 "\n", GIB, 2 * GIB);
  l = limits_of(tree);
  expect_limit(&l.memory, 10 * GIB, 2 * GIB, "memory.limit_in_bytes of cgroup /jobs");
  tree_drop();
}

static void test_limits_inside_a_container_are_found(void) {
  tree_new();
  cgroup_put("", "2147483648", "max", GIB, 0);
  cgroup_put("/../other", "1048576", "max", 0, 0); /* not a cgroup of ours, whatever lies there */
  meminfo_put(64 * GIB, 60 * GIB);
  const struct {
    const char *own, *mount_root;
  } cases[] = {
    { "/docker/0123", "/docker/0123" }, /* the host's name for it, and only it is mounted */
    { "/docker/0123", "/" },            /* the host's name for it, in a namespace of its own */
    { "/../other", "/" },               /* outside the namespace */
    { "/dockerx", "/docker" },          /* not below it, whatever the first letters say */
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    file_put("proc/self/cgroup", "0::%s\n", cases[i].own);
    file_put("proc/self/mountinfo", "35 31 0:30 %s /sys/fs/cgroup ro - cgroup2 cgroup rw\n", cases[i].mount_root);
    gmi_limits_t l = limits_of(tree);
    expect_limit(&l.memory, 2 * GIB, GIB, "memory.max of cgroup /");
  }
  /* Part of a tree is mounted, at a place with a blank in its name. */
  file_put("sys/fs/my groups/x/memory.max", "1048576\n");
  file_put("proc/self/cgroup", "0::/pods/x\n");
  file_put("proc/self/mountinfo", "35 31 0:30 /pods /sys/fs/my\\040groups rw - cgroup2 cgroup rw\n");
  gmi_limits_t l = limits_of(tree);
  expect_limit(&l.memory, MIB, 0, "memory.max of cgroup /x");
  tree_drop();
}

static void test_limits_believe_memory_that_grows_only_with_both_signs(void) {
  tree_new();
  file_put("proc/self/cgroup", "0::/\n");
  file_put("proc/self/mountinfo", VERSION2);
  meminfo_put(32 * GIB, 30 * GIB);
  file_put("proc/zoneinfo",
           "Node 0, zone   Normal\n  pages free     1000\n        spanned  99999999\n        present  %ld\n"
           "        managed  1\nNode 1, zone   Normal\n        present  %ld\n",
           (long)(200 * GIB) / sysconf(_SC_PAGESIZE), (long)(56 * GIB) / sysconf(_SC_PAGESIZE));
  gmi_limits_t l = limits_of(tree); /* no limit promises it */
  expect_limit(&l.available, 32 * GIB, 2 * GIB, "MemAvailable");
  cgroup_put("", "274877906944", "max", GIB, 0); /* 256 GiB */
  l = limits_of(tree);
  expect_limit(&l.available, 256 * GIB, 2 * GIB, "MemAvailable and memory not in MemTotal yet");
  CHECK_EQ(l.memory.free_bytes, 254 * GIB);
  CHECK_EQ(gmi_limits_check(&l, "host_bytes", 200 * GIB, false), GEMINI_OK);
  file_put("proc/zoneinfo", "        present  %ld\n", (long)(33 * GIB) / sysconf(_SC_PAGESIZE));
  l = limits_of(tree); /* the limit is generous, the machine is not */
  expect_limit(&l.memory, 32 * GIB, 2 * GIB, "MemAvailable");
  tree_drop();
}

static void test_limits_of_the_process_bind(void) {
  tree_new();
  meminfo_put(64 * GIB, 60 * GIB);
  file_put("proc/self/limits", "Limit                     Soft Limit           Hard Limit           Units     \n"
                               "Max data size             4294967296           unlimited            bytes     \n"
                               "Max locked memory         8388608              8388608              bytes     \n"
                               "Max address space         unlimited            unlimited            bytes     \n");
  file_put("proc/self/status", "Name:\tx\nVmSize:\t 3145728 kB\nVmLck:\t    1024 kB\nVmData:\t 1048576 kB\n"
                               "CapEff:\t00000000a80425fb\n");
  gmi_limits_t l = limits_of(tree);
  expect_limit(&l.memory, 4 * GIB, GIB, "RLIMIT_DATA");
  expect_limit(&l.locked, 8 * MIB, MIB, "RLIMIT_MEMLOCK");
  CHECK_EQ(gmi_limits_default_host_bytes(&l, true), 4 * MIB);     /* 5.6, in whole 2 MiB */
  CHECK_EQ(gmi_limits_default_host_bytes(&l, false), 2456 * MIB); /* 4/5 of 3 GiB */
  CHECK_EQ(gmi_limits_check(&l, "host_bytes", 7 * MIB, true), GEMINI_OK);
  CHECK_EQ(gmi_limits_check(&l, "host_bytes", 7 * MIB + 1, true), GEMINI_ERR_OOM_HOST);
  CHECK(strstr(gmi_fail_message(), "RLIMIT_MEMLOCK"));
  file_put("proc/self/limits", "Max data size 9999999999 unlimited bytes\nMax address space    4294967296   1 bytes\n"
                               "Max locked memory 1 1 bytes\n");
  file_put("proc/self/status", "VmSize:\t 3145728 kB\nCapEff:\t000001fffeffffff\n"); /* has CAP_IPC_LOCK */
  l = limits_of(tree);
  expect_limit(&l.memory, 4 * GIB, 3 * GIB, "RLIMIT_AS");
  CHECK_EQ(l.locked.limit_bytes, NONE);
  tree_drop();
}

static void test_limits_refuse_with_both_numbers(void) {
  tree_new();
  file_put("proc/self/cgroup", "0::/a\n");
  file_put("proc/self/mountinfo", VERSION2);
  meminfo_put(64 * GIB, 60 * GIB);
  cgroup_put("/a", "8589934592", "max", 3 * GIB, GIB);
  gmi_limits_t l = limits_of(tree);
  CHECK_EQ(gmi_limits_check(&l, "host_bytes", 6 * GIB, false), GEMINI_OK);
  CHECK_EQ(gmi_limits_check(&l, "host_bytes", 6 * GIB + 1, false), GEMINI_ERR_OOM_HOST);
  const char *parts[] = { "host_bytes is 6442450945", "more than the 6442450944 bytes", "memory.max of cgroup /a",
                          "limit 8589934592", "in use 2147483648" };
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) CHECK(strstr(gmi_fail_message(), parts[i]));
  uint64_t chosen = gmi_limits_default_host_bytes(&l, false);
  CHECK(chosen <= 6 * GIB / 5 * 4 && chosen > 6 * GIB / 5 * 4 - 2 * MIB && chosen % (2 * MIB) == 0);
  tree_drop();
}

static void test_limits_name_the_file_that_makes_no_sense(void) {
  tree_new();
  file_put("proc/self/cgroup", "garbage\n0::/\n:::\n");
  file_put("proc/self/mountinfo", "short line\nmore - x\n" VERSION2);
  gmi_limits_t l = { .memory = { .free_bytes = 77 } };
  file_put("sys/fs/cgroup/memory.max", "12 potatoes\n");
  CHECK_EQ(gmi_limits_read(tree, &l), GEMINI_OK); /* a unit after the number is none of our business */
  const char *bad[] = { "lots\n", "", "-5\n", "99999999999999999999999\n", "12potatoes\n" };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    file_put("sys/fs/cgroup/memory.max", "%s", bad[i]);
    l.memory.free_bytes = 77;
    CHECK_EQ(gmi_limits_read(tree, &l), GEMINI_ERR_FORMAT);
    CHECK(strstr(gmi_fail_message(), "/sys/fs/cgroup/memory.max"));
    CHECK_EQ(l.memory.free_bytes, 77);
  }
  file_put("sys/fs/cgroup/memory.max", "max");
  file_put("proc/meminfo", "nothing here\n");
  CHECK_EQ(gmi_limits_read(tree, &l), GEMINI_ERR_FORMAT);
  CHECK(strstr(gmi_fail_message(), "meminfo"));
  tree_drop();
}

static void test_limits_of_a_file_that_cannot_be_read_are_an_error(void) {
  tree_new();
  file_put("proc/meminfo/x", "%s", ""); /* a folder where a file should be */
  gmi_limits_t l;
  CHECK_EQ(gmi_limits_read(tree, &l), GEMINI_ERR_IO);
  CHECK(strstr(gmi_fail_message(), "/proc/meminfo"));
  tree_drop();
}

static void test_limits_of_this_machine_are_sane(void) {
  gmi_limits_t l = limits_of("");
  CHECK(l.available.limit_bytes != NONE && l.available.free_bytes > 0);
  CHECK(l.memory.free_bytes <= l.available.free_bytes && l.memory.free_bytes <= l.cgroup.free_bytes);
  uint64_t chosen = gmi_limits_default_host_bytes(&l, false);
  CHECK(chosen > 0 && chosen < l.memory.free_bytes);
  CHECK_EQ(gmi_limits_check(&l, "host_bytes", chosen, false), GEMINI_OK);
  CHECK_EQ(gmi_limits_check(&l, "host_bytes", UINT64_C(1) << 60, false), GEMINI_ERR_OOM_HOST);
  fprintf(stderr, "    %s: limit %" PRIu64 ", in use %" PRIu64 "; by default %" PRIu64 "\n", l.memory.name,
          l.memory.limit_bytes, l.memory.used_bytes, chosen);
}

/* --- the reservation --- */

/* Can a byte be read there? Asks the kernel, which answers where a read of ours would end the process. */
static bool readable(const void *address) {
  char byte;
  struct iovec here = { &byte, 1 }, there = { (void *)(uintptr_t)address, 1 };
  ssize_t n = process_vm_readv(getpid(), &here, 1, &there, 1, 0);
  CHECK(n == 1 || errno == EFAULT);
  return n == 1;
}

/* What the system says when the library makes pages exist, and what it finds out about the threads that do. */
static atomic_int populate_error, populate_error_count, threads_deaf_to_faults, threads_deaf, threads_seen;
static pthread_t main_thread;
static _Atomic uintptr_t gated;           /* pages at this address come only when it is 0 */
static atomic_int waiting_at_gate, fails; /* threads; 1: what waited is refused */
int madvise(void *base, size_t size, int advice) {
  if (advice == 23 /* MADV_POPULATE_WRITE */) {
    if (atomic_load(&gated) == (uintptr_t)base) {
      atomic_fetch_add(&waiting_at_gate, 1);
      while (atomic_load(&gated)) usleep(100);
      if (atomic_load(&fails)) {
        errno = ENOMEM;
        return -1;
      }
    }
    if (!pthread_equal(pthread_self(), main_thread)) {
      sigset_t blocked;
      pthread_sigmask(SIG_SETMASK, NULL, &blocked);
      atomic_fetch_add(&threads_seen, 1);
      if (sigismember(&blocked, SIGBUS) || sigismember(&blocked, SIGSEGV) || sigismember(&blocked, SIGPROF))
        atomic_fetch_add(&threads_deaf_to_faults, 1);
      if (sigismember(&blocked, SIGINT) && sigismember(&blocked, SIGUSR1)) atomic_fetch_add(&threads_deaf, 1);
    }
    int left = atomic_load(&populate_error_count);
    if (left) {
      if (left > 0) atomic_fetch_sub(&populate_error_count, 1);
      errno = populate_error;
      return -1;
    }
  }
  return (int)syscall(SYS_madvise, base, size, advice);
}

static gmi_reserve_t *reserve_new(uint64_t size, uint32_t flags, uint32_t threads, const char *root) {
  gmi_reserve_config_t config = { .size_bytes = size, .flags = flags, .threads = threads, .root = root };
  gmi_reserve_t *r = NULL;
  CHECK_EQ(gmi_reserve_open(&config, &r), GEMINI_OK);
  CHECK(r);
  return r;
}

static gmi_reserve_figures_t figures_of(gmi_reserve_t *r) {
  gmi_reserve_figures_t f;
  CHECK_EQ(gmi_reserve_figures(r, &f), GEMINI_OK);
  return f;
}

static bool all_are(const uint8_t *bytes, uint64_t size, uint8_t value) {
  for (uint64_t i = 0; i < size; i++)
    if (bytes[i] != value) return false;
  return true;
}

static void test_reserve_is_exact_and_guarded(void) {
  uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
  gmi_reserve_t *r = reserve_new(7 * MIB + 5, 0, 0, NULL);
  uint64_t size = 7 * MIB + page;
  uint8_t *base = gmi_reserve_base(r);
  CHECK_EQ(gmi_reserve_size(r), size);
  CHECK_EQ((uintptr_t)base % gmi_reserve_grain(r), 0);
  CHECK(!readable(base) && !readable(base + size - 1));
  CHECK_EQ(gmi_reserve_commit(r, 0, size), GEMINI_OK);
  CHECK(readable(base) && readable(base + size - 1));
  CHECK(!readable(base - 1) && !readable(base + size));
  CHECK_EQ(gmi_reserve_decommit(r, 0, size), GEMINI_OK);
  gmi_reserve_figures_t f = figures_of(r);
  CHECK_EQ(f.size_bytes, size);
  CHECK_EQ(f.committed_bytes, 0);
  gmi_reserve_close(r);
  CHECK(!readable(base) && !readable(base + size - 1));
  gmi_reserve_close(NULL);
}

static void test_reserve_commit_makes_exactly_the_pages_of_the_part(void) {
  gmi_reserve_t *r = reserve_new(301 * MIB + 4096, 0, 8, NULL); /* long enough for threads, with a short last grain */
  uint64_t size = gmi_reserve_size(r), grain = gmi_reserve_grain(r);
  CHECK_EQ(figures_of(r).resident_bytes, 0);
  CHECK_EQ(gmi_reserve_commit(r, 0, size / 2 / grain * grain), GEMINI_OK);
  gmi_reserve_figures_t f = figures_of(r);
  CHECK_EQ(f.committed_bytes, size / 2 / grain * grain);
  CHECK_EQ(f.resident_bytes, f.committed_bytes);
  CHECK_EQ(gmi_reserve_commit(r, 2 * grain, size - 2 * grain), GEMINI_OK); /* overlaps what is there */
  f = figures_of(r);
  CHECK_EQ(f.committed_bytes, size);
  CHECK_EQ(f.resident_bytes, size);
  fprintf(stderr, "    %" PRIu64 " of %" PRIu64 " MiB are on huge pages%s%s\n", f.huge_bytes / MIB,
          f.resident_bytes / MIB, f.note[0] ? "; " : "", f.note);
  if (grain > 64 * KIB) CHECK(f.huge_bytes > 0);
  CHECK(f.huge_bytes <= f.resident_bytes);
  CHECK_EQ(gmi_reserve_decommit(r, grain, 3 * grain), GEMINI_OK);
  CHECK_EQ(gmi_reserve_decommit(r, 0, 2 * grain), GEMINI_OK); /* partly given back already */
  f = figures_of(r);
  CHECK_EQ(f.committed_bytes, size - 4 * grain);
  CHECK_EQ(f.resident_bytes, f.committed_bytes);
  CHECK_EQ(gmi_reserve_decommit(r, 0, size), GEMINI_OK);
  f = figures_of(r);
  CHECK_EQ(f.committed_bytes, 0);
  CHECK_EQ(f.resident_bytes, 0);
  gmi_reserve_close(r);
}

static void test_reserve_keeps_committed_bytes_and_zeroes_new_ones(void) {
  gemini_status_t (*const commits[])(gmi_reserve_t *, uint64_t, uint64_t) = { gmi_reserve_commit,
                                                                              gmi_reserve_commit_early };
  for (int i = 0; i < 4; i++) {
    gemini_status_t (*const commit)(gmi_reserve_t *, uint64_t, uint64_t) = commits[i / 2];
    gmi_reserve_t *r = reserve_new(16 * MIB, i & 1 ? GMI_RESERVE_SMALL_PAGES : 0, 2, NULL);
    uint8_t *base = gmi_reserve_base(r);
    uint64_t part = 4 * MIB;
    CHECK_EQ(commit(r, part, part), GEMINI_OK);
    CHECK_EQ(figures_of(r).resident_bytes, part);
    CHECK(all_are(base + part, part, 0));
    memset(base + part, 0xa5, part);
    CHECK_EQ(commit(r, 0, 4 * part), GEMINI_OK);
    CHECK(all_are(base, part, 0) && all_are(base + part, part, 0xa5) && all_are(base + 2 * part, 2 * part, 0));
    CHECK_EQ(gmi_reserve_decommit(r, 0, 2 * part), GEMINI_OK);
    CHECK_EQ(commit(r, 0, 2 * part), GEMINI_OK);
    CHECK(all_are(base, 2 * part, 0));
    gmi_reserve_close(r);
  }
}

static void test_reserve_refuses_what_is_no_part_of_it(void) {
  gmi_reserve_t *r = reserve_new(10 * MIB + 4096, 0, 1, NULL);
  uint64_t size = gmi_reserve_size(r), grain = gmi_reserve_grain(r);
  const uint64_t bad[][2] = {
    { size, grain },   { 0, size + grain }, { grain, UINT64_MAX - grain + 1 }, { 1, grain }, { 0, grain + 1 },
    { UINT64_MAX, 1 }, { grain, size - 1 }, { grain / 2, size - grain / 2 }
  };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    CHECK_EQ(gmi_reserve_commit(r, bad[i][0], bad[i][1]), GEMINI_ERR_INVALID);
    CHECK_EQ(gmi_reserve_decommit(r, bad[i][0], bad[i][1]), GEMINI_ERR_INVALID);
  }
  CHECK_EQ(gmi_reserve_commit(r, grain, 0), GEMINI_OK);
  CHECK_EQ(gmi_reserve_commit(r, 0, size), GEMINI_OK);
  CHECK_EQ(figures_of(r).committed_bytes, size);
  gmi_reserve_close(r);
  gmi_reserve_config_t config = { .size_bytes = 0 };
  CHECK_EQ(gmi_reserve_open(&config, &r), GEMINI_ERR_INVALID);
  config.size_bytes = UINT64_MAX;
  CHECK_EQ(gmi_reserve_open(&config, &r), GEMINI_ERR_INVALID);
}

static void test_reserve_without_huge_pages_says_why(void) {
  uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
  tree_new();
  gmi_reserve_t *r = reserve_new(8 * MIB, 0, 1, tree);
  CHECK_EQ(gmi_reserve_grain(r), page);
  CHECK(strstr(figures_of(r).note, "no huge pages"));
  gmi_reserve_close(r);
  file_put("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
  r = reserve_new(8 * MIB, 0, 1, tree);
  CHECK_EQ(gmi_reserve_grain(r), page);
  CHECK(strstr(figures_of(r).note, "says never"));
  CHECK_EQ(gmi_reserve_commit(r, page, 5 * page), GEMINI_OK);
  CHECK_EQ(figures_of(r).resident_bytes, 5 * page);
  CHECK_EQ(figures_of(r).huge_bytes, 0);
  gmi_reserve_close(r);
  file_put("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n");
  file_put("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "3000000\n");
  r = reserve_new(8 * MIB, 0, 1, tree);
  CHECK_EQ(gmi_reserve_grain(r), page);
  CHECK(strstr(figures_of(r).note, "3000000"));
  gmi_reserve_close(r);
  r = reserve_new(MIB, 0, 1, NULL);
  CHECK_EQ(gmi_reserve_grain(r), page);
  CHECK(figures_of(r).note[0]);
  gmi_reserve_close(r);
  tree_drop();
}

/* The memory policy of the mapping at address, by /proc/self/numa_maps; "" when the system has none. */
static void policy_of(const void *address, char *policy, size_t size) {
  char *line = NULL;
  size_t capacity = 0;
  FILE *file = fopen("/proc/self/numa_maps", "r");
  snprintf(policy, size, "%s", "");
  while (file && getline(&line, &capacity, file) >= 0) {
    char word[64];
    if (strtoull(line, NULL, 16) == (uintptr_t)address && sscanf(line, "%*s %63[^=\n]", word) == 1)
      snprintf(policy, size, "%s", word);
  }
  free(line);
  if (file) fclose(file);
}

static gmi_topology_t *topology_saved(const char *name) {
  char path[1024];
  const char *end = strrchr(__FILE__, '/');
  snprintf(path, sizeof path, "%.*s/../data/topology/%s.xml", (int)(end - __FILE__), __FILE__, name);
  gmi_topology_t *t;
  CHECK_EQ(gmi_topology_load(path, &t), GEMINI_OK);
  return t;
}

static void test_gpu_is_found_by_its_place_on_the_bus(void) {
  gmi_topology_t *t = topology_saved("two_sockets");
  uint32_t count = gmi_topology_count(t, GEMINI_OBJECT_GPU);
  CHECK_EQ(count, 8);
  for (uint32_t i = 0; i < count; i++) {
    gemini_topology_object_t gpu = GEMINI_TOPOLOGY_OBJECT_INIT;
    CHECK_EQ(gmi_topology_object(t, GEMINI_OBJECT_GPU, i, &gpu), GEMINI_OK);
    CHECK_EQ(gmi_topology_gpu_at(t, gpu.pci), i);
    for (char *c = gpu.pci; *c; c++) *c = (char)toupper((unsigned char)*c); /* as drivers write it */
    CHECK_EQ(gmi_topology_gpu_at(t, gpu.pci), i);
    gpu.pci[0] = '1';
    CHECK_EQ(gmi_topology_gpu_at(t, gpu.pci), GEMINI_INDEX_NONE);
  }
  gmi_topology_free(t);
  t = topology_saved("no_io");
  CHECK_EQ(gmi_topology_gpu_at(t, "0000:12:00.0"), GEMINI_INDEX_NONE);
  gmi_topology_free(t);
}

static void test_reserve_is_bound_or_says_why_not(void) {
  gmi_topology_t *here, *elsewhere;
  CHECK_EQ(gmi_topology_load(NULL, &here), GEMINI_OK);
  uint32_t node = 0;
  gmi_reserve_config_t config = { .size_bytes = 16 * MIB, .topology = here, .nodes = &node, .node_count = 1 };
  gmi_reserve_t *r;
  CHECK_EQ(gmi_reserve_open(&config, &r), GEMINI_OK);
  gmi_reserve_figures_t f = figures_of(r);
  char policy[64];
  policy_of(gmi_reserve_base(r), policy, sizeof policy);
  fprintf(stderr, "    bound: %d, policy \"%s\", \"%s\"\n", f.bound, policy, f.note);
  if (f.bound)
    CHECK(!policy[0] || ((!strncmp(policy, "prefer", 6) || !strncmp(policy, "bind", 4)) && strstr(policy, ":0")));
  else CHECK(strstr(f.note, "not bound"));
  CHECK_EQ(gmi_reserve_commit(r, 0, gmi_reserve_size(r)), GEMINI_OK);
  cpu_set_t cores, mine, others;
  CHECK(!sched_getaffinity(0, sizeof mine, &mine));
  if (gmi_reserve_cores(r, &cores)) { /* of the node, and the process's; whether the system bound the memory or not */
    CHECK(CPU_COUNT(&cores) > 0);
    CPU_OR(&others, &cores, &mine);
    CHECK(CPU_EQUAL(&others, &mine));
  } else CHECK(gmi_topology_cpus(here, &node, 1, &others) && (CPU_AND(&others, &others, &mine), !CPU_COUNT(&others)));
  gmi_reserve_close(r);
  node = 4321;
  CHECK_EQ(gmi_reserve_open(&config, &r), GEMINI_OK);
  CHECK(!gmi_reserve_cores(r, &cores));
  f = figures_of(r);
  CHECK(!f.bound && strstr(f.note, "not bound") && strstr(f.note, "out of range"));
  gmi_reserve_close(r);
  gmi_topology_free(here);

  elsewhere = topology_saved("no_io");
  config.topology = elsewhere;
  node = 1;
  CHECK_EQ(gmi_reserve_open(&config, &r), GEMINI_OK);
  f = figures_of(r);
  CHECK(!f.bound && strstr(f.note, "saved") && !gmi_reserve_cores(r, &cores));
  policy_of(gmi_reserve_base(r), policy, sizeof policy);
  CHECK(!policy[0] || !strncmp(policy, "default", 7));
  gmi_reserve_close(r);
  gmi_topology_free(elsewhere);
}

static void test_reserve_is_not_passed_on_to_children(void) {
  gmi_reserve_t *r = reserve_new(4 * MIB, 0, 1, NULL);
  CHECK_EQ(gmi_reserve_commit(r, 0, gmi_reserve_size(r)), GEMINI_OK);
  pid_t child = fork();
  CHECK(child >= 0);
  if (!child) {
    bool passed_on = readable(gmi_reserve_base(r));
    gmi_reserve_close(r);
    _exit(passed_on);
  }
  int end = 0;
  CHECK_EQ(waitpid(child, &end, 0), child);
  CHECK_EQ(end, 0);
  gmi_reserve_close(r);
}

static void test_reserve_that_the_system_refuses_is_an_error(void) {
  if (check_is_slow()) return; /* they need more addresses than the limit leaves */
  pid_t child = fork();
  CHECK(child >= 0);
  if (!child) {
    struct rlimit limit = { 256 * MIB, 256 * MIB };
    CHECK_EQ(setrlimit(RLIMIT_AS, &limit), 0);
    gmi_reserve_config_t config = { .size_bytes = GIB };
    gmi_reserve_t *r = NULL;
    CHECK_EQ(gmi_reserve_open(&config, &r), GEMINI_ERR_OOM_HOST);
    CHECK(!r && strstr(gmi_fail_message(), "1073741824"));
    gmi_limits_t l = limits_of("");
    CHECK(!strcmp(l.memory.name, "RLIMIT_AS"));
    CHECK_EQ(gmi_limits_check(&l, "host_bytes", GIB, false), GEMINI_ERR_OOM_HOST);
    limit = (struct rlimit){ 128 * MIB, 128 * MIB };
    CHECK_EQ(setrlimit(RLIMIT_DATA, &limit), 0);
    config = (gmi_reserve_config_t){ .size_bytes = 160 * MIB, .threads = 1 }; /* addresses are no data */
    CHECK_EQ(gmi_reserve_open(&config, &r), GEMINI_OK);
    CHECK_EQ(gmi_reserve_commit(r, 0, 64 * MIB), GEMINI_OK);
    CHECK_EQ(gmi_reserve_commit(r, 0, gmi_reserve_size(r)), GEMINI_ERR_OOM_HOST);
    CHECK(strstr(gmi_fail_message(), "holds 67108864"));
    CHECK_EQ(figures_of(r).resident_bytes, 64 * MIB);
    CHECK_EQ(gmi_reserve_decommit(r, 0, 64 * MIB), GEMINI_OK);
    gmi_reserve_close(r);
    _exit(0);
  }
  int end = 0;
  CHECK_EQ(waitpid(child, &end, 0), child);
  CHECK_EQ(end, 0);
}

typedef struct {
  gmi_reserve_t *r;
  uint64_t offset, size;
  bool decommits;
  gemini_status_t status;
  atomic_bool ended;
} commit_t;
static void *commit_main(void *user) {
  commit_t *c = user;
  c->status =
      c->decommits ? gmi_reserve_decommit(c->r, c->offset, c->size) : gmi_reserve_commit(c->r, c->offset, c->size);
  atomic_store(&c->ended, true);
  return NULL;
}

/* While pages of one part come, others can come as well; who wants the same ones waits, and makes those that did not
 * come. */
static void test_reserve_commits_of_several_threads(void) {
  for (int i = 0; i < 4; i++) {
    gmi_reserve_t *r = reserve_new(16 * MIB, GMI_RESERVE_SMALL_PAGES, 1, NULL);
    uint8_t *base = gmi_reserve_base(r);
    commit_t first = { .r = r, .size = 8 * MIB },
             second = { .r = r, .offset = 4 * MIB, .size = 8 * MIB, .decommits = i & 1 };
    pthread_t threads[2];
    atomic_store(&fails, i / 2);
    atomic_store(&waiting_at_gate, 0);
    atomic_store(&gated, (uintptr_t)base);
    CHECK_EQ(pthread_create(&threads[0], NULL, commit_main, &first), 0);
    while (!atomic_load(&waiting_at_gate)) usleep(100);
    CHECK_EQ(pthread_create(&threads[1], NULL, commit_main, &second), 0);
    CHECK_EQ(gmi_reserve_commit(r, 12 * MIB, 4 * MIB), GEMINI_OK);
    CHECK_EQ(figures_of(r).committed_bytes, 4 * MIB);
    usleep(20000);
    CHECK(!atomic_load(&first.ended) && !atomic_load(&second.ended));
    atomic_store(&gated, 0);
    for (int t = 0; t < 2; t++) pthread_join(threads[t], NULL);
    CHECK_EQ(first.status, atomic_load(&fails) ? GEMINI_ERR_OOM_HOST : GEMINI_OK);
    CHECK_EQ(second.status, GEMINI_OK);
    const uint64_t expected[] = { 16, 8, 12, 4 }; /* MiB */
    gmi_reserve_figures_t f = figures_of(r);
    CHECK_EQ(f.committed_bytes, expected[i] * MIB);
    CHECK_EQ(f.resident_bytes, f.committed_bytes);
    gmi_reserve_close(r);
  }
}

static void test_reserve_commits_early_only_what_is_plenty(void) {
  if (check_is_slow()) return;
  gmi_reserve_t *r = reserve_new(16 * MIB, 0, 1, NULL);
  struct rlimit was, limit;
  CHECK_EQ(getrlimit(RLIMIT_DATA, &was), 0);
  limit = (struct rlimit){ was.rlim_max == RLIM_INFINITY ? 1024 * GIB : was.rlim_max, was.rlim_max };
  CHECK_EQ(setrlimit(RLIMIT_DATA, &limit), 0);
  for (uint64_t i = 0; i < 2; i++) {
    limit.rlim_cur = limits_of("").process.used_bytes + (i ? 308 : 300) * MIB; /* 256 and 3 times 16 are needed */
    CHECK_EQ(setrlimit(RLIMIT_DATA, &limit), 0);
    CHECK_EQ(gmi_reserve_commit_early(r, 0, 16 * MIB), i ? GEMINI_OK : GEMINI_ERR_OOM_HOST);
    CHECK_EQ(figures_of(r).committed_bytes, i * 16 * MIB);
  }
  CHECK_EQ(setrlimit(RLIMIT_DATA, &was), 0);
  gmi_reserve_close(r);
}

static void test_reserve_decommit_of_locked_memory_changes_nothing(void) {
  gmi_reserve_t *r = reserve_new(8 * MIB, 0, 1, NULL);
  uint64_t grain = gmi_reserve_grain(r), size = gmi_reserve_size(r);
  uint8_t *base = gmi_reserve_base(r);
  CHECK_EQ(gmi_reserve_commit(r, 0, size), GEMINI_OK);
  memset(base, 7, size);
  if (syscall(SYS_mlock, base, grain)) { /* sanitizers make mlock() do nothing */
    fprintf(stderr, "    nothing may be locked here\n");
  } else {
    CHECK_EQ(gmi_reserve_decommit(r, 0, grain), GEMINI_ERR_IO);
    CHECK_EQ(figures_of(r).committed_bytes, size);
    CHECK(all_are(base, grain, 7));
    CHECK_EQ(syscall(SYS_munlock, base, grain), 0);
  }
  CHECK_EQ(gmi_reserve_decommit(r, 0, grain), GEMINI_OK);
  CHECK_EQ(figures_of(r).committed_bytes, size - grain);
  gmi_reserve_close(r);
}

/* --- blocks: their range has access only where they have committed it, so that a stray access faults --- */

enum { GRAINS_MAX = 4096 };
typedef struct {
  uint8_t *base, *map;
  uint64_t size_bytes, grain_bytes, map_bytes;
  pthread_mutex_t lock;
  uint64_t committed_bytes; /* from here on: Guarded by lock */
  uint64_t budget_bytes;    /* commits beyond it are refused */
  uint64_t commits, decommits, busy;
  bool ready[GRAINS_MAX];
  bool held[GRAINS_MAX]; /* others have it */
  gmi_host_heap_t *used_inside;
  sem_t *begun, *go_on; /* NULL, or: a commit posts begun and waits for go_on */
} range_t;

static void blocks_refuse_inside(gmi_host_heap_t *b) {
  void *block = NULL;
  if (!b) return;
  CHECK_EQ(gmi_host_heap_alloc(b, 100, 0, &block), GEMINI_ERR_STATE);
  CHECK_EQ(gmi_host_heap_alloc(b, MIB, 0, &block), GEMINI_ERR_STATE);
  CHECK(!block);
}

static void wait_for(sem_t *semaphore) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += 20;
  int error;
  while ((error = sem_timedwait(semaphore, &until)) && errno == EINTR) continue;
  CHECK_EQ(error, 0);
}

static gemini_status_t range_commit(void *user, uint64_t offset, uint64_t size) {
  range_t *range = user;
  uint64_t grain = offset / range->grain_bytes;
  CHECK(offset % range->grain_bytes == 0 && offset + size <= range->size_bytes);
  CHECK(size == range->grain_bytes || offset + size == range->size_bytes);
  blocks_refuse_inside(range->used_inside);
  if (range->begun) {
    sem_post(range->begun);
    wait_for(range->go_on);
  }
  gemini_status_t status = GEMINI_OK;
  pthread_mutex_lock(&range->lock);
  CHECK(!range->ready[grain]);
  if (range->held[grain]) {
    range->busy++;
    status = GEMINI_ERR_BUSY;
  } else if (range->committed_bytes + size > range->budget_bytes) {
    status = gmi_fail(GEMINI_ERR_OOM_HOST, 0, "the test gives no more");
  } else {
    CHECK_EQ(mprotect(range->base + offset, size, PROT_READ | PROT_WRITE), 0);
    range->committed_bytes += size;
    range->commits++;
    range->ready[grain] = true;
  }
  pthread_mutex_unlock(&range->lock);
  return status;
}

static void range_decommit(void *user, uint64_t offset, uint64_t size) {
  range_t *range = user;
  uint64_t grain = offset / range->grain_bytes;
  CHECK(offset % range->grain_bytes == 0);
  CHECK(size == range->grain_bytes || offset + size == range->size_bytes);
  blocks_refuse_inside(range->used_inside);
  pthread_mutex_lock(&range->lock);
  CHECK(range->ready[grain]);
  CHECK_EQ(madvise(range->base + offset, size, MADV_DONTNEED), 0);
  CHECK_EQ(mprotect(range->base + offset, size, PROT_NONE), 0);
  CHECK(range->committed_bytes >= size);
  range->committed_bytes -= size;
  range->decommits++;
  range->ready[grain] = false;
  pthread_mutex_unlock(&range->lock);
}

static gmi_host_heap_t *blocks_new(range_t *range, uint64_t size, uint64_t grain) {
  CHECK((size + grain - 1) / grain <= GRAINS_MAX);
  *range =
      (range_t){ .size_bytes = size, .grain_bytes = grain, .budget_bytes = UINT64_MAX, .map_bytes = size + 2 * MIB };
  pthread_mutex_init(&range->lock, NULL);
  range->map = mmap(NULL, range->map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(range->map != MAP_FAILED);
  range->base = (uint8_t *)(((uintptr_t)range->map + 2 * MIB - 1) & ~(uintptr_t)(2 * MIB - 1));
  gmi_host_heap_config_t config = { range->base, size, grain, range_commit, range_decommit, range };
  gmi_host_heap_t *b = NULL;
  CHECK_EQ(gmi_host_heap_open(&config, &b), GEMINI_OK);
  return b;
}

static void blocks_drop(gmi_host_heap_t *b, range_t *range) {
  gmi_host_heap_close(b);
  CHECK_EQ(range->committed_bytes, 0);
  CHECK_EQ(range->commits, range->decommits);
  munmap(range->map, range->map_bytes);
  pthread_mutex_destroy(&range->lock);
}

static void expect_empty(gmi_host_heap_t *b, const range_t *range) {
  gmi_host_heap_figures_t f;
  gmi_host_heap_figures(b, &f);
  CHECK_EQ(f.block_count, 0);
  CHECK_EQ(f.block_bytes, 0);
  CHECK_EQ(f.extent_bytes, 0);
  CHECK_EQ(f.grain_bytes_used, 0);
  CHECK_EQ(range->committed_bytes, 0);
}

static uint8_t *block_new(gmi_host_heap_t *b, uint64_t size) {
  void *block = NULL;
  CHECK_EQ(gmi_host_heap_alloc(b, size, 0, &block), GEMINI_OK);
  CHECK(block);
  return block;
}

static uint64_t grain_of(const range_t *range, const uint8_t *block) {
  return (uint64_t)(block - range->base) / range->grain_bytes;
}

enum { SLOTS = 192, THREADS = 4 };
typedef struct {
  pthread_mutex_t lock;
  uint8_t *block;
  uint64_t size_bytes;
  uint8_t value;
} slot_t;
typedef struct {
  gmi_host_heap_t *blocks;
  range_t *range;
  slot_t slots[SLOTS];
  _Atomic uint64_t live_bytes, refused, allocated; /* Atomic */
  uint32_t steps;
} program_t;
typedef struct {
  program_t *program;
  uint64_t seed;
} actor_t;

/* Slots belong to all threads: what one allocates, another frees. */
static void *act(void *user) {
  actor_t *actor = user;
  program_t *p = actor->program;
  uint64_t seed = actor->seed;
  for (uint32_t step = 0; step < p->steps; step++) {
    slot_t *slot = &p->slots[check_random(&seed) % SLOTS];
    if (step % 64 == 0) { /* others come and go in the range */
      uint64_t grain = check_random(&seed) % (p->range->size_bytes / p->range->grain_bytes);
      pthread_mutex_lock(&p->range->lock);
      p->range->held[grain] = !p->range->held[grain] && !p->range->ready[grain] && grain % 3 == 0;
      pthread_mutex_unlock(&p->range->lock);
    }
    pthread_mutex_lock(&slot->lock);
    if (slot->block) {
      CHECK(all_are(slot->block, slot->size_bytes, slot->value));
      CHECK_EQ(gmi_host_heap_free(p->blocks, slot->block), GEMINI_OK);
      atomic_fetch_sub(&p->live_bytes, slot->size_bytes);
      slot->block = NULL;
    } else {
      uint32_t shift = (uint32_t)(check_random(&seed) % (check_random(&seed) % 2 ? 14 : 24));
      uint64_t size = 1 + (check_random(&seed) & ((UINT64_C(1) << shift) - 1));
      uint64_t alignment = check_random(&seed) % 4 ? 0 : UINT64_C(1) << check_random(&seed) % 17;
      void *block = NULL;
      gemini_status_t status = gmi_host_heap_alloc(p->blocks, size, alignment, &block);
      if (status) {
        CHECK_EQ(status, GEMINI_ERR_OOM_HOST);
        CHECK(!block);
        atomic_fetch_add(&p->refused, 1);
      } else {
        uint8_t *bytes = block;
        CHECK(bytes >= p->range->base && bytes + size <= p->range->base + p->range->size_bytes);
        CHECK_EQ((uintptr_t)block % (alignment > 256 ? alignment : 256), 0);
        slot->block = bytes;
        slot->size_bytes = size;
        slot->value = (uint8_t)check_random(&seed);
        memset(bytes, slot->value, size);
        atomic_fetch_add(&p->live_bytes, size);
        atomic_fetch_add(&p->allocated, 1);
      }
    }
    pthread_mutex_unlock(&slot->lock);
  }
  return NULL;
}

static void test_blocks_of_many_threads_never_overlap_and_all_come_back(void) {
  /* Too small for all slots, with a last grain that is short. */
  range_t range;
  gmi_host_heap_t *b = blocks_new(&range, 13 * MIB + 64 * KIB, MIB);
  static program_t p;
  p = (program_t){ .blocks = b, .range = &range, .steps = check_is_slow() ? 6000 : 60000 };
  for (int i = 0; i < SLOTS; i++) pthread_mutex_init(&p.slots[i].lock, NULL);
  pthread_t threads[THREADS];
  actor_t actors[THREADS];
  for (uint32_t i = 0; i < THREADS; i++) {
    actors[i] = (actor_t){ &p, 0x9e3779b97f4a7c15u * (i + 1) };
    CHECK_EQ(pthread_create(&threads[i], NULL, act, &actors[i]), 0);
  }
  for (uint32_t i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  gmi_host_heap_figures_t f;
  gmi_host_heap_figures(b, &f);
  fprintf(stderr,
          "    %" PRIu64 " blocks, %" PRIu64 " refused, %" PRIu64 " commits, %" PRIu64 " busy; at the end %" PRIu64
          " bytes in %" PRIu64 " of extents\n",
          p.allocated, p.refused, range.commits, range.busy, f.block_bytes, f.extent_bytes);
  CHECK(p.allocated > p.steps && p.refused > 0 && range.commits > 100 && range.busy > 0);
  uint64_t live = 0;
  for (int i = 0; i < SLOTS; i++) live += p.slots[i].block != NULL;
  CHECK_EQ(f.block_count, live);
  CHECK(f.block_bytes >= p.live_bytes && f.extent_bytes >= f.block_bytes && f.extent_bytes <= f.range_bytes);
  CHECK(f.grain_bytes_used >= f.extent_bytes);
  CHECK_EQ(f.grain_bytes_used, range.committed_bytes);
  for (int i = 0; i < SLOTS; i++) {
    if (p.slots[i].block) {
      CHECK(all_are(p.slots[i].block, p.slots[i].size_bytes, p.slots[i].value));
      CHECK_EQ(gmi_host_heap_free(b, p.slots[i].block), GEMINI_OK);
    }
    pthread_mutex_destroy(&p.slots[i].lock);
  }
  expect_empty(b, &range);
  blocks_drop(b, &range);
}

static void test_blocks_beyond_the_range_are_refused_with_both_numbers(void) {
  const uint64_t sizes[] = { 250, 4096, 60000, MIB };
  for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
    range_t range;
    gmi_host_heap_t *b = blocks_new(&range, 8 * MIB, 2 * MIB);
    uint64_t count = 0, limit = 8 * MIB / sizes[k];
    void **blocks = calloc(limit + 1, sizeof *blocks);
    CHECK(blocks);
    gemini_status_t status;
    while (!(status = gmi_host_heap_alloc(b, sizes[k], 0, &blocks[count]))) {
      count++;
      CHECK(count <= limit);
    }
    CHECK_EQ(status, GEMINI_ERR_OOM_HOST);
    CHECK(count * sizes[k] > 8 * MIB * 3 / 4);
    char asked[64];
    snprintf(asked, sizeof asked, "a host block of %" PRIu64 " bytes does not fit", sizes[k]);
    CHECK(strstr(gmi_fail_message(), asked) && strstr(gmi_fail_message(), "of 8388608 bytes"));
    CHECK(!blocks[count]);
    CHECK_EQ(gmi_host_heap_free(b, blocks[count / 2]), GEMINI_OK);
    CHECK_EQ(gmi_host_heap_alloc(b, sizes[k], 0, &blocks[count / 2]), GEMINI_OK);
    for (uint64_t i = 0; i < count; i++) CHECK_EQ(gmi_host_heap_free(b, blocks[i]), GEMINI_OK);
    expect_empty(b, &range);
    CHECK_EQ(gmi_host_heap_alloc(b, 8 * MIB, 0, &blocks[0]), GEMINI_OK); /* in one piece again */
    CHECK_EQ(gmi_host_heap_free(b, blocks[0]), GEMINI_OK);
    CHECK_EQ(gmi_host_heap_alloc(b, 8 * MIB + 1, 0, &blocks[0]), GEMINI_ERR_OOM_HOST);
    CHECK_EQ(gmi_host_heap_alloc(b, UINT64_MAX, 0, &blocks[0]), GEMINI_ERR_OOM_HOST);
    CHECK_EQ(gmi_host_heap_alloc(b, 1, UINT64_C(1) << 40, &blocks[0]), GEMINI_ERR_OOM_HOST);
    blocks_drop(b, &range);
    free(blocks);
  }
}

static void test_blocks_whose_memory_does_not_come_return_its_status(void) {
  range_t range;
  gmi_host_heap_t *b = blocks_new(&range, 16 * MIB, MIB);
  void *small, *large = NULL;
  CHECK_EQ(gmi_host_heap_alloc(b, 100, 0, &small), GEMINI_OK);
  range.budget_bytes = 3 * MIB;
  CHECK_EQ(gmi_host_heap_alloc(b, 5 * MIB, 0, &large), GEMINI_ERR_OOM_HOST);
  CHECK(!large && strstr(gmi_fail_message(), "the test gives no more"));
  CHECK_EQ(range.committed_bytes, MIB); /* what had come already went back */
  gmi_host_heap_figures_t f;
  gmi_host_heap_figures(b, &f);
  CHECK_EQ(f.grain_bytes_used, MIB);
  CHECK_EQ(f.block_count, 1);
  range.budget_bytes = UINT64_MAX;
  CHECK_EQ(gmi_host_heap_alloc(b, 5 * MIB, 0, &large), GEMINI_OK);
  memset(large, 1, 5 * MIB);
  CHECK_EQ(gmi_host_heap_free(b, large), GEMINI_OK);
  CHECK_EQ(gmi_host_heap_free(b, small), GEMINI_OK);
  expect_empty(b, &range);
  blocks_drop(b, &range);
}

static void test_blocks_crowd_at_the_end(void) {
  range_t range;
  gmi_host_heap_t *b = blocks_new(&range, 64 * MIB, MIB);
  uint8_t *blocks[16], *low = range.base + (64 - 17) * MIB;
  for (int i = 0; i < 16; i++) blocks[i] = block_new(b, MIB - 100 * (uint64_t)i);
  for (int i = 0; i < 16; i++) CHECK(blocks[i] >= low);
  for (int i = 0; i < 16; i += 2) CHECK_EQ(gmi_host_heap_free(b, blocks[i]), GEMINI_OK);
  for (int i = 0; i < 16; i += 2) blocks[i] = block_new(b, MIB / 3);
  for (int i = 0; i < 16; i++) CHECK(blocks[i] >= low);
  CHECK(range.committed_bytes <= 17 * MIB);
  blocks_drop(b, &range); /* with live blocks */
}

static void test_blocks_fill_backed_grains_before_they_ask_for_others(void) {
  range_t range;
  gmi_host_heap_t *b = blocks_new(&range, 16 * MIB, MIB);
  uint8_t *top = block_new(b, MIB), *next = block_new(b, MIB), *third = block_new(b, MIB / 8 * 5);
  CHECK_EQ(grain_of(&range, top), 15);
  CHECK_EQ(grain_of(&range, next), 14);
  CHECK_EQ(grain_of(&range, third), 13);
  CHECK_EQ(gmi_host_heap_free(b, top), GEMINI_OK);
  CHECK(!range.ready[15]);
  uint64_t commits = range.commits;
  uint8_t *small = block_new(b, 5000), *medium = block_new(b, MIB / 4);
  CHECK_EQ(grain_of(&range, small), 13);
  CHECK_EQ(grain_of(&range, medium), 13);
  CHECK_EQ(range.commits, commits);
  CHECK_EQ(grain_of(&range, block_new(b, MIB / 2)), 15); /* no room for it in 13 */
  blocks_drop(b, &range);

  /* A hole that begins and ends in backed grains, with others between. */
  b = blocks_new(&range, 16 * MIB, MIB);
  block_new(b, 3 * MIB - 64 * KIB);
  uint8_t *gap = block_new(b, 3 * MIB), *below = block_new(b, MIB / 2);
  CHECK_EQ(grain_of(&range, below), 9);
  CHECK_EQ(gmi_host_heap_free(b, gap), GEMINI_OK);
  CHECK(range.ready[13] && !range.ready[12] && !range.ready[11] && range.ready[10]);
  commits = range.commits;
  CHECK(block_new(b, MIB / 2) == range.base + 11 * MIB - MIB / 2);
  CHECK_EQ(range.commits, commits);
  blocks_drop(b, &range);

  /* A hole across two backed grains, neither of which has room alone; the grain above is not backed. */
  b = blocks_new(&range, 16 * MIB, MIB);
  top = block_new(b, MIB);
  block_new(b, MIB / 4 * 3);
  gap = block_new(b, MIB / 2);
  below = block_new(b, MIB / 4 * 3);
  CHECK(below == range.base + 13 * MIB);
  CHECK_EQ(gmi_host_heap_free(b, gap), GEMINI_OK);
  CHECK_EQ(gmi_host_heap_free(b, top), GEMINI_OK);
  CHECK(block_new(b, MIB / 2 - 16 * KIB) == gap + 16 * KIB);
  CHECK_EQ(range.commits, 3);
  blocks_drop(b, &range);
}

static void test_blocks_in_many_pieces_come_together_again(void) {
  enum { BLOCKS = 1000 };
  range_t range;
  gmi_host_heap_t *b = blocks_new(&range, 64 * MIB, MIB);
  uint8_t *blocks[BLOCKS];
  for (int i = 0; i < BLOCKS; i++) blocks[i] = block_new(b, 64 * KIB);
  for (int i = 0; i < BLOCKS; i += 2) CHECK_EQ(gmi_host_heap_free(b, blocks[i]), GEMINI_OK);
  gmi_host_heap_figures_t f;
  gmi_host_heap_figures(b, &f);
  CHECK_EQ(f.extent_bytes, BLOCKS / 2 * 64 * KIB);
  void *large = NULL;
  CHECK_EQ(gmi_host_heap_alloc(b, 2 * MIB, 0, &large), GEMINI_ERR_OOM_HOST);
  for (int i = 1; i < BLOCKS; i += 2) CHECK_EQ(gmi_host_heap_free(b, blocks[i]), GEMINI_OK);
  expect_empty(b, &range);
  CHECK(block_new(b, 64 * MIB) == range.base);
  blocks_drop(b, &range);
}

static void test_blocks_pass_over_grains_that_others_hold(void) {
  range_t range;
  gmi_host_heap_t *b = blocks_new(&range, 16 * MIB, MIB);
  range.held[15] = range.held[13] = true;
  uint8_t *small = block_new(b, 100), *one = block_new(b, MIB), *three = block_new(b, 3 * MIB);
  CHECK_EQ(grain_of(&range, small), 14);
  CHECK_EQ(grain_of(&range, one), 12);
  CHECK_EQ(grain_of(&range, three), 9);
  CHECK_EQ(range.committed_bytes, 5 * MIB); /* what was tried in vain has gone back */
  range.held[4] = true;
  void *large = NULL;
  CHECK_EQ(gmi_host_heap_alloc(b, 5 * MIB, 0, &large), GEMINI_ERR_OOM_HOST); /* 9 grains are free, 4 in one piece */
  CHECK(strstr(gmi_fail_message(), "held by chunks"));
  CHECK_EQ(range.committed_bytes, 5 * MIB);
  CHECK_EQ(grain_of(&range, block_new(b, 4 * MIB)), 5);
  for (int i = 0; i < 16; i++) range.held[i] = true;
  CHECK_EQ(gmi_host_heap_alloc(b, MIB, 0, &large), GEMINI_ERR_OOM_HOST);
  CHECK_EQ(gmi_host_heap_alloc(b, 200000, 0, &large), GEMINI_OK); /* beside the small one */
  CHECK_EQ(grain_of(&range, large), 14);
  range.held[15] = false;
  CHECK_EQ(grain_of(&range, block_new(b, MIB)), 15);
  blocks_drop(b, &range);
}

static void test_blocks_that_are_large_are_not_rounded_to_classes(void) {
  range_t range;
  gmi_host_heap_t *b = blocks_new(&range, 32 * MIB, 4 * MIB);
  const uint64_t sizes[][2] = {
    { 57345, 64 * KIB }, { 512 * KIB + 1, 528 * KIB }, { 5 * MIB + 1, 5 * MIB + 16 * KIB }, { 6 * MIB, 6 * MIB }
  };
  uint64_t bytes = 0;
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    uint8_t *block = block_new(b, sizes[i][0]);
    CHECK_EQ((uintptr_t)block % (16 * KIB), 0);
    memset(block, 1, sizes[i][0]);
    bytes += sizes[i][1];
    gmi_host_heap_figures_t f;
    gmi_host_heap_figures(b, &f);
    CHECK_EQ(f.block_bytes, bytes);
    CHECK_EQ(f.extent_bytes, bytes);
  }
  void *aligned;
  CHECK_EQ(gmi_host_heap_alloc(b, 700000, 2 * MIB, &aligned), GEMINI_OK);
  CHECK_EQ((uintptr_t)aligned % (2 * MIB), 0);
  CHECK_EQ(gmi_host_heap_alloc(b, 100, MIB, &aligned), GEMINI_OK);
  CHECK_EQ((uintptr_t)aligned % MIB, 0);
  blocks_drop(b, &range);
}

static void test_blocks_work_in_grains_of_any_pages(void) {
  const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), grains[] = { page, 3 * page, 64 * KIB, MIB + page, 0 };
  for (size_t k = 0; k < sizeof grains / sizeof *grains; k++) {
    range_t range;
    uint64_t size = 8 * MIB + 5 * page; /* its end is of no use to jemalloc */
    gmi_host_heap_t *b = blocks_new(&range, size, grains[k] ? grains[k] : size);
    uint8_t *blocks[40];
    uint64_t seed = k + 1, bytes = 0;
    for (int round = 0; round < 20; round++) {
      for (int i = 0; i < 40; i++) {
        uint64_t one = 1 + check_random(&seed) % (i % 4 ? 20000 : 700000);
        blocks[i] = block_new(b, one);
        memset(blocks[i], i, one);
        bytes += one;
      }
      gmi_host_heap_figures_t f;
      gmi_host_heap_figures(b, &f);
      CHECK_EQ(f.grain_bytes_used, range.committed_bytes);
      CHECK(f.grain_bytes_used >= f.extent_bytes && f.extent_bytes >= f.block_bytes);
      if (grains[k] == page) CHECK_EQ(f.grain_bytes_used, f.extent_bytes);
      for (int i = 0; i < 40; i++) CHECK_EQ(*blocks[i], i);
      for (int i = 0; i < 40; i++) CHECK_EQ(gmi_host_heap_free(b, blocks[i * 7 % 40]), GEMINI_OK);
      expect_empty(b, &range);
    }
    CHECK(bytes > 8 * MIB);
    blocks_drop(b, &range);
  }
}

typedef struct {
  gmi_host_heap_t *blocks;
  uint64_t size_bytes;
  void *block;
  gemini_status_t status;
} request_t;
static void *request_main(void *user) {
  request_t *r = user;
  r->status = gmi_host_heap_alloc(r->blocks, r->size_bytes, 0, &r->block);
  return NULL;
}

static void test_blocks_go_on_while_a_grain_is_being_committed(void) {
  for (int refuse = 0; refuse < 2; refuse++) {
    range_t range;
    gmi_host_heap_t *b = blocks_new(&range, 16 * MIB, MIB);
    sem_t begun, go_on;
    sem_init(&begun, 0, 0);
    sem_init(&go_on, 0, 0);
    uint8_t *old = block_new(b, MIB), *other = block_new(b, MIB / 2), *small = block_new(b, 3000);
    range.begun = &begun;
    range.go_on = &go_on;
    range.budget_bytes = refuse ? 2 * MIB : UINT64_MAX;
    request_t requests[2] = { { b, MIB / 4 * 3, NULL, 0 }, { b, 200000, NULL, 0 } }; /* both in grain 13 */
    pthread_t threads[2];
    CHECK_EQ(grain_of(&range, block_new(b, MIB / 8 * 3)), 14); /* which is full now, but for the small one's slab */
    for (int i = 0; i < 2; i++) {
      CHECK_EQ(pthread_create(&threads[i], NULL, request_main, &requests[i]), 0);
      if (!i) wait_for(&begun); /* the first is in commit */
    }
    CHECK_EQ(gmi_host_heap_free(b, old), GEMINI_OK); /* does not wait for it */
    CHECK(!range.ready[15]);
    CHECK_EQ(grain_of(&range, block_new(b, 3000)), 14); /* neither does this */
    CHECK_EQ(gmi_host_heap_free(b, small), GEMINI_OK);
    gmi_host_heap_figures_t f;
    gmi_host_heap_figures(b, &f);
    CHECK_EQ(f.grain_bytes_used, MIB);
    pthread_mutex_lock(&range.lock);
    if (refuse) range.budget_bytes = MIB;
    pthread_mutex_unlock(&range.lock);
    for (int i = 0; i < 4; i++) sem_post(&go_on);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < 2; i++) CHECK_EQ(requests[i].status, refuse ? GEMINI_ERR_OOM_HOST : GEMINI_OK);
    gmi_host_heap_figures(b, &f);
    CHECK_EQ(f.grain_bytes_used, range.committed_bytes);
    CHECK_EQ(gmi_host_heap_free(b, other), GEMINI_OK);
    range.begun = NULL;
    blocks_drop(b, &range);
    sem_destroy(&begun);
    sem_destroy(&go_on);
  }
}

static void test_blocks_cannot_be_used_inside_their_callbacks(void) {
  range_t range, other_range;
  gmi_host_heap_t *b = blocks_new(&range, 4 * MIB, MIB), *other = blocks_new(&other_range, 4 * MIB, MIB);
  range.used_inside = other; /* not those of another range either: jemalloc would take them from anywhere */
  uint8_t *block = block_new(b, 100);
  CHECK_EQ(gmi_host_heap_free(b, block), GEMINI_OK);
  CHECK(range.commits == 1 && range.decommits == 1);
  block = block_new(other, 100);
  CHECK_EQ(gmi_host_heap_free(other, block), GEMINI_OK);
  blocks_drop(b, &range);
  blocks_drop(other, &other_range);
}

static void test_blocks_misused_are_refused(void) {
  range_t range, other_range;
  gmi_host_heap_t *b = blocks_new(&range, 4 * MIB, MIB), *other = blocks_new(&other_range, 4 * MIB, MIB);
  void *block = NULL, *others = NULL;
  CHECK_EQ(gmi_host_heap_alloc(b, 0, 0, &block), GEMINI_ERR_INVALID);
  CHECK_EQ(gmi_host_heap_alloc(b, 16, 24, &block), GEMINI_ERR_INVALID);
  CHECK_EQ(gmi_host_heap_alloc(other, 16, 0, &others), GEMINI_OK);
  CHECK_EQ(gmi_host_heap_free(b, others), GEMINI_ERR_INVALID);
  CHECK_EQ(gmi_host_heap_free(b, &block), GEMINI_ERR_INVALID);
  const uint64_t sizes[] = { 1, 300, 57344, 57345, MIB };
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) { /* inside a block, and after its end */
    uint8_t *live = block_new(b, sizes[i]), *neighbour = block_new(b, sizes[i]);
    for (uint64_t at = 1; at < sizes[i]; at = at == 1 ? 256 : at * 2)
      CHECK_EQ(gmi_host_heap_free(b, live + at), GEMINI_ERR_INVALID);
    CHECK_EQ(gmi_host_heap_free(b, live), GEMINI_OK);
    CHECK_EQ(gmi_host_heap_free(b, live), GEMINI_ERR_INVALID);
    CHECK(strstr(gmi_fail_message(), "live"));
    CHECK_EQ(gmi_host_heap_free(b, neighbour), GEMINI_OK);
  }
  CHECK_EQ(gmi_host_heap_free(b, range.base + range.size_bytes), GEMINI_ERR_INVALID);
  CHECK_EQ(gmi_host_heap_free(b, NULL), GEMINI_OK);
  CHECK_EQ(gmi_host_heap_free(other, others), GEMINI_OK);
  CHECK(!block);
  expect_empty(b, &range);
  expect_empty(other, &other_range);
  blocks_drop(b, &range);
  blocks_drop(other, &other_range);
  gmi_host_heap_close(NULL);
  gmi_host_heap_config_t bad = { range.base, 4 * MIB + 1, 0, NULL, NULL, NULL };
  CHECK_EQ(gmi_host_heap_open(&bad, &b), GEMINI_ERR_INVALID);
  bad = (gmi_host_heap_config_t){ range.base + 1, 4 * MIB, 0, NULL, NULL, NULL };
  CHECK_EQ(gmi_host_heap_open(&bad, &b), GEMINI_ERR_INVALID);
  bad = (gmi_host_heap_config_t){ NULL, 4 * MIB, 0, NULL, NULL, NULL };
  CHECK_EQ(gmi_host_heap_open(&bad, &b), GEMINI_ERR_INVALID);
}

static void test_blocks_can_be_opened_again_and_again(void) {
  for (int i = 0; i < (check_is_slow() ? 300 : 5000); i++) { /* more than arenas exist */
    range_t range;
    gmi_host_heap_t *b = blocks_new(&range, 4 * MIB, MIB);
    void *block;
    CHECK_EQ(gmi_host_heap_alloc(b, 1000, 0, &block), GEMINI_OK);
    blocks_drop(b, &range);
  }
}

static gemini_status_t reserve_commit(void *user, uint64_t offset, uint64_t size) {
  return gmi_reserve_commit(user, offset, size);
}
static void reserve_decommit(void *user, uint64_t offset, uint64_t size) {
  CHECK_EQ(gmi_reserve_decommit(user, offset, size), GEMINI_OK);
}

static void test_blocks_of_a_reservation_hold_what_they_use(void) {
  gmi_reserve_t *r = reserve_new(64 * MIB, 0, 1, NULL);
  gmi_host_heap_config_t config = { gmi_reserve_base(r), gmi_reserve_size(r), gmi_reserve_grain(r),
                                    reserve_commit,      reserve_decommit,    r };
  gmi_host_heap_t *b;
  CHECK_EQ(gmi_host_heap_open(&config, &b), GEMINI_OK);
  void *blocks[30];
  for (int i = 0; i < 30; i++) CHECK_EQ(gmi_host_heap_alloc(b, MIB, 4096, &blocks[i]), GEMINI_OK);
  gmi_reserve_figures_t f = figures_of(r);
  CHECK(f.committed_bytes >= 30 * MIB && f.committed_bytes <= 30 * MIB + gmi_reserve_grain(r));
  CHECK_EQ(f.resident_bytes, f.committed_bytes);
  for (int i = 0; i < 30; i++) CHECK_EQ(gmi_host_heap_free(b, blocks[i]), GEMINI_OK);
  CHECK_EQ(figures_of(r).resident_bytes, 0);
  gmi_host_heap_close(b);
  gmi_reserve_close(r);
}

/* --- the budget: what the process holds, all of it --- */

/* Resident memory and page tables. */
static uint64_t held_bytes(void) {
  char line[256];
  uint64_t kib = 0, sum = 0;
  FILE *file = fopen("/proc/self/status", "r");
  CHECK(file);
  while (fgets(line, sizeof line, file))
    if (sscanf(line, "VmRSS: %" SCNu64, &kib) == 1 || sscanf(line, "VmPTE: %" SCNu64, &kib) == 1) sum += kib * KIB;
  fclose(file);
  CHECK(sum > 0);
  return sum;
}

static void expect_held(uint64_t baseline, uint64_t budget, uint64_t more, const char *what) {
  uint64_t held = held_bytes() - baseline;
  fprintf(stderr, "    %s: %" PRIu64 " bytes for a budget of %" PRIu64 ", %+.2f %%\n", what, held, budget,
          ((double)held / (double)budget - 1) * 100);
  CHECK(held <= budget + more);
}

/* In a process of its own, where nothing that was freed hides what is new. What a process brings in once, such as code and
 * jemalloc's own state, is there before it begins, by one block of a small budget. */
static void budget_program(uint64_t budget, uint32_t flags, uint64_t block_bytes) {
  gmi_host_heap_t *small;
  void *one;
  range_t range;
  small = blocks_new(&range, 4 * MIB, MIB);
  CHECK_EQ(gmi_host_heap_alloc(small, block_bytes ? block_bytes : 1, 0, &one), GEMINI_OK);
  blocks_drop(small, &range);
  uint64_t baseline = held_bytes();
  gmi_reserve_t *r = reserve_new(budget, flags, 0, NULL);
  uint8_t *base = gmi_reserve_base(r);
  uint64_t half = budget / 2 / gmi_reserve_grain(r) * gmi_reserve_grain(r);
  /* Chunks below, blocks above; blocks are written to, all of them. */
  CHECK_EQ(gmi_reserve_commit(r, 0, block_bytes ? 0 : budget), GEMINI_OK);
  if (!block_bytes) {
    expect_held(baseline, budget, budget / 100, "chunks");
    CHECK_EQ(gmi_reserve_decommit(r, half, budget - half), GEMINI_OK);
    expect_held(baseline, half, budget / 100, "half of them");
  } else {
    gmi_host_heap_config_t config = { base, budget, 2 * MIB, reserve_commit, reserve_decommit, r };
    gmi_host_heap_t *b;
    CHECK_EQ(gmi_host_heap_open(&config, &b), GEMINI_OK);
    void *block = NULL, *last = NULL;
    uint64_t count = 0;
    while (!gmi_host_heap_alloc(b, block_bytes, 0, &block)) {
      memset(block, 3, block_bytes);
      *(void **)block = last; /* a list through them: notes of our own would count */
      last = block;
      count++;
    }
    CHECK(count * block_bytes > budget - budget / 50);
    char what[64];
    snprintf(what, sizeof what, "%" PRIu64 " blocks of %" PRIu64, count, block_bytes);
    expect_held(baseline, budget, budget / 100, what);
    for (; last; last = block) {
      block = *(void **)last;
      CHECK_EQ(gmi_host_heap_free(b, last), GEMINI_OK);
    }
    CHECK_EQ(figures_of(r).resident_bytes, 0);
    gmi_host_heap_close(b);
  }
  gmi_reserve_close(r);
}

static void test_budget_is_what_the_process_holds(void) {
  if (check_is_slow()) return; /* they hold memory of their own for each of ours */
  const struct {
    uint64_t budget_bytes;
    uint32_t flags;
    uint64_t block_bytes; /* 0: chunks */
  } cases[] = { { 512 * MIB, 0, 0 },        { 256 * MIB, GMI_RESERVE_SMALL_PAGES, 0 },
                { 256 * MIB, 0, 256 },      { 256 * MIB, GMI_RESERVE_SMALL_PAGES, 4096 },
                { 256 * MIB, 0, 64 * KIB }, { 256 * MIB, 0, 3 * MIB } };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
      budget_program(cases[i].budget_bytes, cases[i].flags, cases[i].block_bytes);
      _exit(0);
    }
    int end = 0;
    CHECK_EQ(waitpid(child, &end, 0), child);
    CHECK_EQ(end, 0);
  }
}

static void test_reserve_tries_for_a_while_when_the_system_says_again(void) {
  gmi_reserve_t *r = reserve_new(4 * MIB, 0, 1, NULL);
  struct timespec before, after;
  populate_error = EAGAIN;
  populate_error_count = 5;
  CHECK_EQ(gmi_reserve_commit(r, 0, 2 * MIB), GEMINI_OK);
  CHECK_EQ(populate_error_count, 0);
  populate_error_count = -1;
  clock_gettime(CLOCK_MONOTONIC, &before);
  CHECK_EQ(gmi_reserve_commit(r, 2 * MIB, 2 * MIB), GEMINI_ERR_OOM_HOST);
  clock_gettime(CLOCK_MONOTONIC, &after);
  populate_error_count = 0;
  CHECK(after.tv_sec - before.tv_sec >= 1);
  CHECK_EQ(gmi_reserve_commit(r, 2 * MIB, 2 * MIB), GEMINI_OK);
  gmi_reserve_close(r);
}

static void test_reserve_threads_take_faults_but_no_other_signals(void) {
  gmi_reserve_t *r = reserve_new(160 * MIB, 0, 4, NULL);
  threads_seen = threads_deaf = threads_deaf_to_faults = 0;
  for (int i = 0; i < 50 && !threads_seen; i++) { /* this thread may have done it all before another one begins */
    CHECK_EQ(gmi_reserve_commit(r, 0, 160 * MIB), GEMINI_OK);
    CHECK_EQ(gmi_reserve_decommit(r, 0, 160 * MIB), GEMINI_OK);
  }
  CHECK(threads_seen > 0);
  CHECK_EQ(threads_deaf, threads_seen);
  CHECK_EQ(threads_deaf_to_faults, 0);
  gmi_reserve_close(r);
}

int main(void) {
  main_thread = pthread_self();
  RUN(test_limits_of_an_empty_system_are_none);
  RUN(test_limits_take_the_tightest_cgroup_of_the_path);
  RUN(test_limits_count_cache_that_is_more_than_current_as_none);
  RUN(test_limits_of_version_1_are_read);
  RUN(test_limits_inside_a_container_are_found);
  RUN(test_limits_believe_memory_that_grows_only_with_both_signs);
  RUN(test_limits_of_the_process_bind);
  RUN(test_limits_refuse_with_both_numbers);
  RUN(test_limits_name_the_file_that_makes_no_sense);
  RUN(test_limits_of_a_file_that_cannot_be_read_are_an_error);
  RUN(test_limits_of_this_machine_are_sane);
  RUN(test_reserve_is_exact_and_guarded);
  RUN(test_reserve_commit_makes_exactly_the_pages_of_the_part);
  RUN(test_reserve_keeps_committed_bytes_and_zeroes_new_ones);
  RUN(test_reserve_refuses_what_is_no_part_of_it);
  RUN(test_reserve_without_huge_pages_says_why);
  RUN(test_gpu_is_found_by_its_place_on_the_bus);
  RUN(test_reserve_is_bound_or_says_why_not);
  RUN(test_reserve_is_not_passed_on_to_children);
  RUN(test_reserve_that_the_system_refuses_is_an_error);
  RUN(test_reserve_commits_of_several_threads);
  RUN(test_reserve_commits_early_only_what_is_plenty);
  RUN(test_reserve_decommit_of_locked_memory_changes_nothing);
  RUN(test_blocks_of_many_threads_never_overlap_and_all_come_back);
  RUN(test_blocks_beyond_the_range_are_refused_with_both_numbers);
  RUN(test_blocks_whose_memory_does_not_come_return_its_status);
  RUN(test_blocks_crowd_at_the_end);
  RUN(test_blocks_fill_backed_grains_before_they_ask_for_others);
  RUN(test_blocks_in_many_pieces_come_together_again);
  RUN(test_blocks_pass_over_grains_that_others_hold);
  RUN(test_blocks_that_are_large_are_not_rounded_to_classes);
  RUN(test_blocks_work_in_grains_of_any_pages);
  RUN(test_blocks_go_on_while_a_grain_is_being_committed);
  RUN(test_blocks_cannot_be_used_inside_their_callbacks);
  RUN(test_blocks_misused_are_refused);
  RUN(test_blocks_can_be_opened_again_and_again);
  RUN(test_blocks_of_a_reservation_hold_what_they_use);
  RUN(test_reserve_tries_for_a_while_when_the_system_says_again);
  RUN(test_reserve_threads_take_faults_but_no_other_signals);
  RUN(test_budget_is_what_the_process_holds);
  return check_done();
}

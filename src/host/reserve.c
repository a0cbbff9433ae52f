/* Reserves, commits, decommits and measures the host tier's memory. SPDX-License-Identifier: Apache-2.0
 *
 * The range is mapped once, PROT_NONE, and never unmapped before close, so its addresses stay its own. Committing a
 * part takes two steps: mprotect() gives access in sections of OPEN_BYTES, which stay accessible from then on; then
 * every page is touched, so that a lack of memory shows as an error here and not as a signal or the OOM killer at a
 * later access. Decommitting is madvise(MADV_DONTNEED): pages go, access stays.
 *
 * First touch also decides where pages lie and takes most of the time (the kernel zeroes them). Large parts are touched
 * by several short-lived threads on the cores near the wanted NUMA nodes; the calling thread works, too.
 *
 * The lock is not held while pages are touched, so that several parts can be committed at once. */
#include "host/reserve.h"
#include "base/clock.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "base/status.h"
#include "base/thread.h"
#include "host/limits.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef PR_SET_VMA
#define PR_SET_VMA 0x53564d41 /* Linux 5.17 */
#define PR_SET_VMA_ANON_NAME 0
#endif

enum { THREADS_LIMIT = 64, AGAIN_PAUSE_NS = 1000000 };
#define NS_PER_S UINT64_C(1000000000)
#define AGAIN_NS (2 * NS_PER_S)
#define ALIGN_BYTES (UINT64_C(1) << 20)  /* as gemini_host_alloc() says; a multiple of the smallest chunk */
#define SLICE_BYTES (UINT64_C(16) << 20) /* what a touching thread takes at a time */
#define OPEN_BYTES (UINT64_C(64) << 20)  /* unit of mprotect(): smaller ones would split the range into many mappings */
#define SHARE_BYTES (UINT64_C(64) << 20) /* for each thread at least, unless it stores: more cost more than they save */
#define SPARE_BYTES (UINT64_C(256) << 20) /* that the system must have left beside memory that is not needed yet, */
enum { SPARE_PARTS = 2 };                 /* and beside so many parts that others commit meanwhile */

/* COMING marks the grains that a commit is adding, so that a failure undoes those and no others, and so that other
 * commits and decommits of them wait. */
enum { GRAIN_EMPTY = 0, GRAIN_COMMITTED = 1, GRAIN_COMING = 2 };

struct gmi_reserve {
  uint8_t *base;
  uint64_t size_bytes; /* whole pages */
  uint64_t page_bytes;
  uint64_t grain_bytes;
  uint64_t grain_count;
  uint32_t threads;
  bool bound;
  bool cpus_known, cpus_near;
  cpu_set_t cpus; /* for touching threads: the process's cores, of these the ones near the nodes if cpus_near */
  char note[240];
  pthread_cond_t came;      /* grains are COMING no more */
  pthread_mutex_t lock;     /* guards what follows; what precedes does not change after open */
  uint64_t committed_bytes; /* Guarded by lock */
  bool *opened;             /* by section of OPEN_BYTES: it is accessible. Guarded by lock */
  uint8_t grains[];         /* GRAIN_*; Guarded by lock */
};

/* ---- opening */

static void note_add(gmi_reserve_t *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void note_add(gmi_reserve_t *r, const char *format, ...) {
  size_t length = strlen(r->note);
  if (length && length + 2 < sizeof r->note) length += (size_t)snprintf(r->note + length, 3, "; ");
  va_list args;
  va_start(args, format);
  vsnprintf(r->note + length, sizeof r->note - length, format, args);
  va_end(args);
}

static bool line_read(const char *root, const char *path, char *line, size_t size) {
  char full[PATH_MAX];
  int length = snprintf(full, sizeof full, "%s%s", root, path);
  FILE *file = length > 0 && (size_t)length < sizeof full ? fopen(full, "re") : NULL;
  bool ok = file && fgets(line, (int)size, file);
  if (file) fclose(file);
  return ok;
}

/* The size of a transparent huge page; 0: they are not available, and note says why. */
static uint64_t huge_page_bytes(const char *root, char *note, size_t note_size) {
  char line[128];
  if (!line_read(root, "/sys/kernel/mm/transparent_hugepage/enabled", line, sizeof line)) {
    snprintf(note, note_size, "no huge pages: this system has no transparent ones");
    return 0;
  }
  if (strstr(line, "[never]")) {
    snprintf(note, note_size, "no huge pages: /sys/kernel/mm/transparent_hugepage/enabled says never");
    return 0;
  }
  uint64_t bytes = UINT64_C(2) << 20; /* the size on x86, for older kernels, which do not tell it */
  if (line_read(root, "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", line, sizeof line))
    bytes = strtoull(line, NULL, 10);
  if (bytes < 4096 || bytes > UINT64_C(1) << 30 || bytes & (bytes - 1)) {
    snprintf(note, note_size, "no huge pages: hpage_pmd_size says %.20s", line);
    return 0;
  }
  return bytes;
}

/* Maps the range, aligned, without access, between two guard pages. The guard pages catch accesses beyond the range,
 * and keep the kernel from merging its mappings with neighbours', so that smaps reports it separately. */
static uint8_t *range_map(uint64_t size_bytes, uint64_t page_bytes, uint64_t align_bytes) {
  uint64_t total = size_bytes + align_bytes + 2 * page_bytes;
  uint8_t *raw = mmap(NULL, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return NULL;
  uintptr_t first = (uintptr_t)raw + page_bytes;
  uint8_t *base = (uint8_t *)((first + align_bytes - 1) & ~(uintptr_t)(align_bytes - 1));
  uint8_t *begin = base - page_bytes, *end = base + size_bytes + page_bytes;
  if (begin > raw) munmap(raw, (size_t)(begin - raw));
  if (end < raw + total) munmap(end, (size_t)(raw + total - end));
  return base;
}

static void range_unmap(uint8_t *base, uint64_t size_bytes, uint64_t page_bytes) {
  munmap(base - page_bytes, size_bytes + 2 * page_bytes);
}

/* Sets the memory policy before any page exists: it decides where pages are placed when they are first touched. */
static void range_bind(gmi_reserve_t *r, const gmi_reserve_config_t *config) {
  if (!config->topology || !config->node_count) return;
  char reason[160] = "";
  r->bound = gmi_topology_bind(config->topology, r->base, r->size_bytes, config->nodes, config->node_count, reason,
                               sizeof reason);
  if (!r->bound) note_add(r, "not bound to a NUMA node: %s", reason);
  cpu_set_t near;
  /* Also where the system refuses the policy, as containers do: pages lie near the core that touches them first. */
  if (r->cpus_known && gmi_topology_cpus(config->topology, config->nodes, config->node_count, &near)) {
    CPU_AND(&near, &near, &r->cpus); /* never leave the cores that the process was given */
    r->cpus_near = CPU_COUNT(&near) > 0;
    if (r->cpus_near) r->cpus = near;
  }
}

gemini_status_t gmi_reserve_open(const gmi_reserve_config_t *config, gmi_reserve_t **reserve_out) {
  const char *root = config->root ? config->root : "";
  uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
  if (!config->size_bytes || config->size_bytes > UINT64_C(1) << 46)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "%" PRIu64 " bytes to reserve, must be 1 to 2^46", config->size_bytes);
  uint64_t size = (config->size_bytes + page - 1) / page * page;
  char note[sizeof((gmi_reserve_t *)NULL)->note] = "";
  uint64_t huge = 0;
  if (!(config->flags & GMI_RESERVE_SMALL_PAGES)) huge = huge_page_bytes(root, note, sizeof note);
  if (huge > size) {
    snprintf(note, sizeof note, "no huge pages: the range is shorter than one");
    huge = 0;
  }
  uint8_t *base = range_map(size, page, huge > ALIGN_BYTES ? huge : page > ALIGN_BYTES ? page : ALIGN_BYTES);
  if (!base)
    return gmi_fail(GEMINI_ERR_OOM_HOST, errno, "no address range for %" PRIu64 " bytes of host memory: %s", size,
                    strerror(errno));
  if (huge && madvise(base, size, MADV_HUGEPAGE)) {
    snprintf(note, sizeof note, "no huge pages: madvise: %s", strerror(errno));
    huge = 0;
  }
#ifdef MADV_NOHUGEPAGE
  if (!huge) madvise(base, size, MADV_NOHUGEPAGE); /* else touching one page could make a whole huge page exist */
#endif
  uint64_t grain = huge ? huge : page, count = (size + grain - 1) / grain;
  gmi_reserve_t *r = calloc(1, sizeof *r + count);
  bool *opened = calloc((size + OPEN_BYTES - 1) / OPEN_BYTES, sizeof *opened);
  if (!r || !opened) {
    free(r);
    free(opened);
    range_unmap(base, size, page);
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the records of %" PRIu64 " grains", count);
  }
  r->base = base;
  r->opened = opened;
  r->size_bytes = size;
  r->page_bytes = page;
  r->grain_bytes = grain;
  r->grain_count = count;
  memcpy(r->note, note, sizeof note);
  /* A forked child has no use for the range, and copy-on-write after a fork would take memory beyond the budget. */
  madvise(base, size, MADV_DONTFORK);
  prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, base, size, "gemini host"); /* seen in /proc/PID/maps */
  r->cpus_known = sched_getaffinity(0, sizeof r->cpus, &r->cpus) == 0;
  range_bind(r, config);
  r->threads = config->threads;
  if (!r->threads) {
    long cores = r->cpus_known ? CPU_COUNT(&r->cpus) : sysconf(_SC_NPROCESSORS_ONLN);
    r->threads = cores > 1 ? (uint32_t)cores : 1;
  }
  if (r->threads > THREADS_LIMIT) r->threads = THREADS_LIMIT;
  pthread_mutex_init(&r->lock, NULL);
  pthread_cond_init(&r->came, NULL);
  *reserve_out = r;
  return GEMINI_OK;
}

void gmi_reserve_close(gmi_reserve_t *r) {
  if (!r) return;
  range_unmap(r->base, r->size_bytes, r->page_bytes);
  pthread_cond_destroy(&r->came);
  pthread_mutex_destroy(&r->lock);
  free(r->opened);
  free(r);
}

uint8_t *gmi_reserve_base(const gmi_reserve_t *r) { return r->base; }
uint64_t gmi_reserve_size(const gmi_reserve_t *r) { return r->size_bytes; }
uint64_t gmi_reserve_grain(const gmi_reserve_t *r) { return r->grain_bytes; }
bool gmi_reserve_cores(const gmi_reserve_t *r, cpu_set_t *cores_out) {
  if (r->cpus_near) *cores_out = r->cpus;
  return r->cpus_near;
}

/* ---- first touch */

/* A part that several threads touch. Lives on the stack of range_touch(), which joins all threads: the joins order
 * everything that they did before its return, so the two atomics can be relaxed. */
typedef struct {
  uint8_t *begin, *end;
  uint64_t page_bytes;
  const cpu_set_t *cpus; /* where the other threads run; NULL: anywhere */
  bool stores;           /* touch by stores */
  _Atomic uint64_t next; /* Atomic: offset of the first slice that no thread has taken. Relaxed: it only divides work */
  _Atomic int error;     /* Atomic: errno of a failure, or 0. Relaxed: a hint to stop; returned after the joins */
} touch_t;

/* Makes the pages of a slice exist, which nothing has used yet: they read as zeros. */
static void slice_store(uint8_t *begin, uint64_t bytes, uint64_t page_bytes) {
  for (uint64_t at = 0; at < bytes; at += page_bytes) *(volatile uint8_t *)(begin + at) = 0;
}

/* The same by MADV_POPULATE_WRITE, which reports a lack of memory as an error; stores, which older kernels need,
 * cannot. EAGAIN is tried again for AGAIN_NS. Returns 0 or an errno. */
static int slice_touch(uint8_t *begin, uint64_t bytes, uint64_t page_bytes) {
  uint64_t deadline_ns = 0;
  while (madvise(begin, bytes, MADV_POPULATE_WRITE)) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN) {
      if (!deadline_ns) deadline_ns = gmi_now_ns() + AGAIN_NS;
      if (gmi_now_ns() >= deadline_ns) return EAGAIN;
      nanosleep(&(struct timespec){ 0, AGAIN_PAUSE_NS }, NULL);
      continue;
    }
    if (errno != EINVAL) return errno;
    slice_store(begin, bytes, page_bytes); /* EINVAL: the kernel is older than 5.14 */
    break;
  }
  return 0;
}

static void *touch_main(void *user) {
  touch_t *t = user;
  uint64_t total = (uint64_t)(t->end - t->begin);
  while (!atomic_load_explicit(&t->error, memory_order_relaxed)) {
    uint64_t at = atomic_fetch_add_explicit(&t->next, SLICE_BYTES, memory_order_relaxed);
    if (at >= total) break;
    const uint64_t bytes = total - at < SLICE_BYTES ? total - at : SLICE_BYTES;
    int error = 0;
    if (t->stores) slice_store(t->begin + at, bytes, t->page_bytes);
    else error = slice_touch(t->begin + at, bytes, t->page_bytes);
    if (error) atomic_store_explicit(&t->error, error, memory_order_relaxed);
  }
  return NULL;
}

static void *touch_thread(void *user) {
  const touch_t *t = user;
  if (t->cpus) (void)pthread_setaffinity_np(pthread_self(), sizeof *t->cpus, t->cpus);
  return touch_main(user);
}

/* Touches a part with as many threads as there are shares and cores. The calling thread works, too, so a thread that
 * cannot be started only makes it slower. The start of a thread and MADV_POPULATE_WRITE take the same lock of the
 * process: with 16 threads, parts of 256 MiB come at half the rate of 4 threads. Threads that store do not wait for
 * each other. Returns 0 or an errno. */
static int range_touch(gmi_reserve_t *r, uint8_t *begin, uint64_t bytes, bool stores) {
  touch_t t = { begin, begin + bytes, r->page_bytes, r->cpus_known ? &r->cpus : NULL, stores, 0, 0 };
  pthread_t threads[THREADS_LIMIT];
  const uint64_t share = stores ? SLICE_BYTES : SHARE_BYTES, shares = (bytes + share - 1) / share;
  uint32_t started = 0, wanted = (shares < r->threads ? (uint32_t)shares : r->threads) - 1;
  while (started < wanted && !gmi_thread_start(&threads[started], touch_thread, &t)) started++;
  touch_main(&t);
  for (uint32_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
  return atomic_load_explicit(&t.error, memory_order_relaxed);
}

/* ---- parts */

/* Makes a part accessible. Where the system limits promised memory (vm.overcommit_memory, RLIMIT_DATA) this is what
 * counts against the limit. Called with the lock held. Returns 0 or an errno. */
static int range_open(gmi_reserve_t *r, uint64_t offset, uint64_t bytes) {
  for (uint64_t i = offset / OPEN_BYTES; i <= (offset + bytes - 1) / OPEN_BYTES; i++) {
    uint64_t begin = i * OPEN_BYTES, left = r->size_bytes - begin;
    if (r->opened[i]) continue;
    if (mprotect(r->base + begin, left < OPEN_BYTES ? left : OPEN_BYTES, PROT_READ | PROT_WRITE)) return errno;
    r->opened[i] = true;
  }
  return 0;
}

static gemini_status_t part_check(const gmi_reserve_t *r, uint64_t offset, uint64_t size) {
  if (offset > r->size_bytes || size > r->size_bytes - offset || offset % r->grain_bytes ||
      ((offset + size) % r->grain_bytes && offset + size != r->size_bytes))
    return gmi_fail(GEMINI_ERR_INVALID, 0,
                    "%" PRIu64 " bytes at %" PRIu64 " are no part of a reservation of %" PRIu64
                    " bytes in grains of %" PRIu64,
                    size, offset, r->size_bytes, r->grain_bytes);
  return GEMINI_OK;
}

/* Finds the first run of neighbouring grains in a state, from *first up to last (exclusive). */
static bool run_find(const gmi_reserve_t *r, uint64_t *first, uint64_t last, uint8_t state, uint64_t *count_out) {
  uint64_t at = *first;
  while (at < last && r->grains[at] != state) at++;
  uint64_t end = at;
  while (end < last && r->grains[end] == state) end++;
  *first = at;
  *count_out = end - at;
  return end > at;
}

static uint64_t run_bytes(const gmi_reserve_t *r, uint64_t first, uint64_t count) {
  uint64_t begin = first * r->grain_bytes, end = (first + count) * r->grain_bytes;
  return (end < r->size_bytes ? end : r->size_bytes) - begin; /* the last grain may be short */
}

/* Takes the lock once no other call is adding grains of these. */
static void grains_lock(gmi_reserve_t *r, uint64_t first, uint64_t last) {
  pthread_mutex_lock(&r->lock);
  while (first < last && memchr(r->grains + first, GRAIN_COMING, last - first)) pthread_cond_wait(&r->came, &r->lock);
}

/* First loop: mark the empty grains COMING. Second loop: make their pages exist, run by run, up to the first failure,
 * without the lock. Third loop: turn COMING into COMMITTED, or, after a failure, give the pages back and turn it into
 * EMPTY. Sections that were made accessible stay so. */
static gemini_status_t part_commit(gmi_reserve_t *r, uint64_t offset, uint64_t size, bool stores) {
  gemini_status_t status = part_check(r, offset, size);
  if (status) return status;
  const uint64_t first = offset / r->grain_bytes, last = (offset + size + r->grain_bytes - 1) / r->grain_bytes;
  uint64_t count;
  int error = 0;
  grains_lock(r, first, last);
  for (uint64_t at = first; !error && run_find(r, &at, last, GRAIN_EMPTY, &count); at += count) {
    memset(r->grains + at, GRAIN_COMING, count);
    error = range_open(r, at * r->grain_bytes, run_bytes(r, at, count));
  }
  for (uint64_t at = first; !error && run_find(r, &at, last, GRAIN_COMING, &count); at += count) {
    pthread_mutex_unlock(&r->lock);
    error = range_touch(r, r->base + at * r->grain_bytes, run_bytes(r, at, count), stores);
    pthread_mutex_lock(&r->lock);
  }
  for (uint64_t at = first; run_find(r, &at, last, GRAIN_COMING, &count); at += count) {
    uint64_t bytes = run_bytes(r, at, count);
    if (error) madvise(r->base + at * r->grain_bytes, bytes, MADV_DONTNEED);
    else r->committed_bytes += bytes;
    memset(r->grains + at, error ? GRAIN_EMPTY : GRAIN_COMMITTED, count);
  }
  uint64_t committed = r->committed_bytes;
  pthread_cond_broadcast(&r->came);
  pthread_mutex_unlock(&r->lock);
  if (error)
    return gmi_fail(GEMINI_ERR_OOM_HOST, error,
                    "the system gave no memory for %" PRIu64 " bytes of the host tier, which holds %" PRIu64
                    " of %" PRIu64 ": %s",
                    size, committed, r->size_bytes, strerror(error));
  return GEMINI_OK;
}

gemini_status_t gmi_reserve_commit(gmi_reserve_t *r, uint64_t offset, uint64_t size) {
  return part_commit(r, offset, size, false);
}

gemini_status_t gmi_reserve_commit_early(gmi_reserve_t *r, uint64_t offset, uint64_t size) {
  gmi_limits_t limits;
  gemini_status_t status = gmi_limits_read("", &limits);
  if (!status)
    status = gmi_limits_check(&limits, "what is committed early", (1 + SPARE_PARTS) * size + SPARE_BYTES, false);
  return status ? status : part_commit(r, offset, size, true);
}

gemini_status_t gmi_reserve_decommit(gmi_reserve_t *r, uint64_t offset, uint64_t size) {
  gemini_status_t status = part_check(r, offset, size);
  if (status) return status;
  const uint64_t first = offset / r->grain_bytes, last = (offset + size + r->grain_bytes - 1) / r->grain_bytes;
  uint64_t count;
  grains_lock(r, first, last);
  for (uint64_t at = first; !status && run_find(r, &at, last, GRAIN_COMMITTED, &count); at += count) {
    uint64_t bytes = run_bytes(r, at, count);
    if (madvise(r->base + at * r->grain_bytes, bytes, MADV_DONTNEED)) {
      status = gmi_fail(GEMINI_ERR_IO, errno, "%" PRIu64 " bytes of host memory could not be given back: %s", bytes,
                        strerror(errno));
      break;
    }
    memset(r->grains + at, GRAIN_EMPTY, count);
    r->committed_bytes -= bytes;
  }
  pthread_mutex_unlock(&r->lock);
  return status;
}

/* ---- figures. Sums up the entries of smaps that lie within the range; mprotect() may have split it into several. */

gemini_status_t gmi_reserve_figures(gmi_reserve_t *r, gmi_reserve_figures_t *figures_out) {
  gmi_reserve_figures_t f = { .size_bytes = r->size_bytes, .grain_bytes = r->grain_bytes, .bound = r->bound };
  memcpy(f.note, r->note, sizeof f.note);
  pthread_mutex_lock(&r->lock);
  f.committed_bytes = r->committed_bytes;
  pthread_mutex_unlock(&r->lock);
  FILE *file = fopen("/proc/self/smaps", "re");
  if (!file) return gmi_fail(GEMINI_ERR_IO, errno, "/proc/self/smaps: %s", strerror(errno));
  char *line = NULL;
  size_t capacity = 0;
  bool ours = false;
  errno = 0;
  while (getline(&line, &capacity, file) >= 0) {
    uint64_t begin, end, kib;
    if (sscanf(line, "%" SCNx64 "-%" SCNx64 " ", &begin, &end) == 2)
      ours = begin >= (uintptr_t)r->base && end <= (uintptr_t)r->base + r->size_bytes;
    else if (ours && sscanf(line, "Rss: %" SCNu64 " kB", &kib) == 1) f.resident_bytes += kib * 1024;
    else if (ours && sscanf(line, "AnonHugePages: %" SCNu64 " kB", &kib) == 1) f.huge_bytes += kib * 1024;
  }
  int error = ferror(file) ? errno : 0;
  free(line);
  fclose(file);
  if (error) return gmi_fail(GEMINI_ERR_IO, error, "/proc/self/smaps: %s", strerror(error));
  *figures_out = f;
  return GEMINI_OK;
}

/* Host workers, with the library's internals: what they wait for, and what they do when it failed.
 * SPDX-License-Identifier: Apache-2.0 */
#include <sched.h>
#include <sys/resource.h>
#include <time.h>

#include "../check.h"
#include "core/manager.h"
#include "core/workers.h"
#include "figures.h"
#include "gemini.h"

#define OK(call) CHECK_EQ(call, GEMINI_OK)
enum { CHUNK = 65536, JOBS = 40 };

static gemini_manager_t open_manager(uint32_t workers, gemini_arena_t *arena_out) {
  gemini_config_t c = GEMINI_CONFIG_INIT;
  gemini_manager_t mgr;
  c.device_bytes = 8 * CHUNK;
  c.host_bytes = 16 * CHUNK;
  c.chunk_bytes = CHUNK;
  c.update_threads = workers;
  OK(gemini_manager_open(&c, &mgr));
  gemini_arena_config_t a = GEMINI_ARENA_CONFIG_INIT;
  OK(gemini_arena_create(mgr, &a, arena_out));
  return mgr;
}

static void pause_ms(long ms) { nanosleep(&(struct timespec){ .tv_nsec = ms * 1000000 }, NULL); }

/* ---- draining */
typedef struct {
  long ms;
  _Atomic int *done;
} nap_t;
static void nap(void *user, const gemini_update_span_t *span) {
  nap_t *n = user;
  (void)span;
  pause_ms(n->ms);
  atomic_fetch_add(n->done, 1);
}

static gmi_job_t *nap_job(nap_t *n) {
  gmi_job_t *job = calloc(1, sizeof *job);
  CHECK(job);
  job->fn = nap;
  job->user = n;
  job->span.element_count = 1;
  return job;
}

static gmi_manager_t *flooded;
static _Atomic bool flooding;
static void *flood(void *user) { /* short jobs, so that many end while the long one runs */
  while (atomic_load(&flooding)) {
    if (gmi_workers_pending(flooded) < 8) gmi_workers_push(flooded, nap_job(user));
    else pause_ms(1);
  }
  return NULL;
}

static void test_drain_waits_for_the_jobs_before_it_and_no_others(void) {
  gemini_arena_t arena;
  gemini_manager_t mgr = open_manager(2, &arena);
  flooded = gmi_manager_get(mgr);
  _Atomic int long_done = 0, short_done = 0;
  nap_t slow = { 60, &long_done }, quick = { 0, &short_done };
  pthread_t thread;
  gmi_workers_push(flooded, nap_job(&slow));
  atomic_store(&flooding, true);
  CHECK(!pthread_create(&thread, NULL, flood, &quick));
  gmi_workers_drain(flooded, __func__);
  CHECK_EQ(atomic_load(&long_done), 1);
  CHECK(atomic_load(&flooding)); /* it returned although jobs were still being submitted */
  atomic_store(&flooding, false);
  CHECK(!pthread_join(thread, NULL));
  CHECK(atomic_load(&short_done) > 0);
  OK(gemini_manager_close(mgr));
}

/* ---- the rate */
/* A job of so many elements that takes so many milliseconds has been done. */
static void nap_of(gmi_manager_t *m, uint64_t elements, long ms) {
  static _Atomic int done;
  nap_t n = { ms, &done };
  gmi_job_t *job = nap_job(&n);
  job->span.element_count = elements;
  gmi_workers_push(m, job);
  gmi_workers_drain(m, "test");
}
/* Naps take what they are to take, or longer: up to LATE times as long counts as that. */
enum { LATE = 10, MS = 1000000 /* ns */ };
static void check_rate(gmi_manager_t *m, double ns) {
  const double is = gmi_workers_ns_per_element(m, GEMINI_PASS_BOTH);
  if (is < ns || is > LATE * ns) fprintf(stderr, "%g ns, expected %g\n", is, ns);
  CHECK(is >= ns && is <= LATE * ns);
}
static void test_the_rate_is_that_of_the_last_two_iterations(void) {
  gemini_arena_t arena;
  gemini_manager_t mgr = open_manager(1, &arena);
  gmi_manager_t *m = gmi_manager_get(mgr);
  CHECK(gmi_workers_ns_per_element(m, GEMINI_PASS_BOTH) == 0);
  gmi_workers_iteration(m);
  nap_of(m, 10, 50);
  check_rate(m, 5 * MS);
  gmi_workers_iteration(m);
  check_rate(m, 5 * MS);
  for (int i = 0; i < 2; i++) nap_of(m, 1000, 2); /* elements count, not slices */
  check_rate(m, 54.0 / 2010 * MS);
  gmi_workers_iteration(m);
  check_rate(m, 0.002 * MS);
  gmi_workers_iteration(m);
  check_rate(m, 0.002 * MS);
  nap_of(m, 1, 20);
  for (int i = 0; i < 3; i++) gmi_workers_iteration(m); /* nothing was updated in the last two */
  check_rate(m, 20 * MS);
  OK(gemini_manager_close(mgr));
}

/* ---- priority */
static void note_nice(void *user, const gemini_update_span_t *span) {
  (void)span;
  atomic_store((_Atomic int *)user, getpriority(PRIO_PROCESS, 0));
}
static void test_workers_give_way_to_other_threads(void) {
  gemini_arena_t arena;
  gemini_manager_t mgr = open_manager(1, &arena);
  gmi_manager_t *m = gmi_manager_get(mgr);
  _Atomic int nice = -100;
  gmi_job_t *job = calloc(1, sizeof *job);
  CHECK(job);
  job->fn = note_nice;
  job->user = &nice;
  job->span.element_count = 1;
  const int mine = getpriority(PRIO_PROCESS, 0);
  gmi_workers_push(m, job);
  gmi_workers_drain(m, __func__);
  CHECK_EQ(atomic_load(&nice), mine + 10 < 19 ? mine + 10 : 19);
  CHECK_EQ(getpriority(PRIO_PROCESS, 0), mine);
  OK(gemini_manager_close(mgr));
}

/* ---- order */
typedef struct {
  _Atomic int next;
  _Atomic int wrong;
} order_t;
static void in_order(void *user, const gemini_update_span_t *span) {
  order_t *o = user;
  if (atomic_fetch_add(&o->next, 1) != (int)span->first_element) atomic_fetch_add(&o->wrong, 1);
  pause_ms((long)(span->first_element % 3));
}
static void test_jobs_on_one_slot_run_in_their_order(void) {
  gemini_arena_t arena;
  gemini_manager_t mgr = open_manager(4, &arena);
  gmi_manager_t *m = gmi_manager_get(mgr);
  order_t order = { 0 };
  gmi_slot_t slot = { 0 };
  struct {
    gmi_job_t job;
    gmi_slot_t *slots[1];
    uint64_t after[1];
  } *jobs[JOBS];
  for (uint64_t i = 0; i < JOBS; i++) {
    CHECK((jobs[i] = calloc(1, sizeof *jobs[i])));
    jobs[i]->slots[0] = &slot;
    jobs[i]->after[0] = i;
    jobs[i]->job = (gmi_job_t){ .fn = in_order, .user = &order, .slot_count = 1 };
    jobs[i]->job.slots = jobs[i]->slots;
    jobs[i]->job.after = jobs[i]->after;
    jobs[i]->job.span.first_element = i;
    jobs[i]->job.span.element_count = 1;
    gmi_workers_push(m, &jobs[i]->job);
  }
  gmi_workers_wait_slot(m, &slot, JOBS);
  CHECK_EQ(atomic_load(&order.next), JOBS);
  CHECK_EQ(atomic_load(&order.wrong), 0);
  OK(gemini_manager_close(mgr));
}

enum { MANY = 300 };
typedef struct {
  int count;
  uint64_t uses[MANY];
} uses_t;
static void note(void *user, const gemini_update_span_t *span) { /* one worker: one at a time */
  uses_t *o = user;
  o->uses[o->count++] = span->first_element;
}
static void wait_for(void *user, const gemini_update_span_t *span) {
  (void)span;
  while (!atomic_load((_Atomic int *)user)) pause_ms(1);
}
/* Of all that are ready, wherever in the queue. */
static void test_what_is_used_soonest_overtakes(void) {
  gemini_arena_t arena;
  gemini_manager_t mgr = open_manager(1, &arena);
  gmi_manager_t *m = gmi_manager_get(mgr);
  for (uint64_t stride = 1; stride < MANY; stride += 7) { /* the order of submission: up, down, and others */
    _Atomic int all_queued = 0;
    uses_t o = { 0 };
    gmi_job_t *first = calloc(1, sizeof *first);
    CHECK(first);
    *first = (gmi_job_t){ .fn = wait_for, .user = &all_queued, .span.element_count = 1 };
    gmi_workers_push(m, first);
    for (uint64_t i = 0; i < MANY; i++) {
      gmi_job_t *job = calloc(1, sizeof *job);
      CHECK(job);
      *job = (gmi_job_t){ .fn = note, .user = &o, .next_use = i * (MANY - stride) % MANY / 2 };
      job->span.first_element = job->next_use * MANY + i; /* of equals, the oldest first */
      job->span.element_count = 1;
      gmi_workers_push(m, job);
    }
    pause_ms(1); /* what came since the worker looked is seen a while later only */
    atomic_store(&all_queued, 1);
    gmi_workers_drain(m, __func__);
    CHECK_EQ(o.count, MANY);
    for (int i = 1; i < MANY; i++) CHECK(o.uses[i - 1] < o.uses[i]);
  }
  OK(gemini_manager_close(mgr));
}

/* ---- slices */
enum { ELEMENTS = 1000003 };
typedef struct {
  _Atomic int slices, wrong;
  pthread_mutex_t lock;
  pthread_t threads[8];
  int thread_count;
} shared_t;
static int threads_of(shared_t *o) {
  pthread_mutex_lock(&o->lock);
  int count = o->thread_count;
  pthread_mutex_unlock(&o->lock);
  return count;
}
static void add_one(void *user, const gemini_update_span_t *span) {
  shared_t *o = user;
  uint8_t *bytes = span->ptr[0];
  uint32_t *words = span->ptr[1];
  atomic_fetch_add(&o->slices, 1);
  pthread_mutex_lock(&o->lock);
  int i = 0;
  while (i < o->thread_count && !pthread_equal(o->threads[i], pthread_self())) i++;
  if (i == o->thread_count) o->threads[o->thread_count++] = pthread_self();
  pthread_mutex_unlock(&o->lock);
  for (uint64_t k = 0; k < span->element_count; k++) {
    bytes[k]++;
    words[k] += (uint32_t)(span->first_element + k);
  }
  /* Does not end before another worker has begun: a loaded machine may give that one its turn late. */
  for (int ms = 0; ms < 60000 && threads_of(o) < 2; ms++) pause_ms(1);
}
static void test_workers_share_a_job(void) {
  gemini_arena_t arena;
  gemini_manager_t mgr = open_manager(4, &arena);
  gmi_manager_t *m = gmi_manager_get(mgr);
  uint8_t *bytes = calloc(ELEMENTS, 1);
  uint32_t *words = calloc(ELEMENTS, sizeof *words);
  gmi_job_t *job = calloc(1, sizeof *job);
  CHECK(bytes && words && job);
  shared_t o = { .lock = PTHREAD_MUTEX_INITIALIZER };
  *job = (gmi_job_t){ .fn = add_one, .user = &o, .element_bytes = { 1, 4 } };
  job->span = (gemini_update_span_t){
    .first_element = 77, .element_count = ELEMENTS, .arena_count = 2, .ptr = { bytes, words }
  };
  gmi_workers_push(m, job);
  gmi_workers_drain(m, __func__);
  for (uint32_t k = 0; k < ELEMENTS; k++) CHECK(bytes[k] == 1 && words[k] == 77 + k);
  CHECK_EQ(o.slices, 4);
  CHECK(o.thread_count > 1);
  free(bytes);
  free(words);
  OK(gemini_manager_close(mgr));
}

/* ---- failed work before an update */
static void count_span(void *user, const gemini_update_span_t *span) {
  (void)span;
  atomic_fetch_add((_Atomic int *)user, 1);
}
static void test_update_after_failed_copy_does_not_run_and_says_so(void) {
  gemini_arena_t arena;
  gemini_manager_t mgr = open_manager(1, &arena);
  gmi_manager_t *m = gmi_manager_get(mgr);
  gemini_tensor_t tensor;
  OK(gemini_tensor_register(mgr, arena, "t", CHUNK, GEMINI_OFFSET_NEXT, &tensor));
  gemini_access_t a = gemini_tensor_access(tensor, 0, 0, GEMINI_WRITE, 0);
  OK(gemini_acquire(mgr, &a, 1, GEMINI_STREAM_CALLER));
  memset(a.ptr, 1, CHUNK);
  OK(gemini_release(mgr, &a, 1, GEMINI_STREAM_CALLER));
  _Atomic int spans = 0;
  uint32_t mode = GEMINI_READ_WRITE;
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.flags = GEMINI_UPDATE_LATE;
  u.arenas = &arena;
  u.modes = &mode;
  u.arena_count = 1;
  u.fn = count_span;
  u.user = (void *)&spans;
  OK(gmi_device_sim_fail(m->device.self, gmi_link_out(m)->stream, GEMINI_ERR_DEVICE));
  OK(gemini_update(mgr, &u)); /* its bytes leave the device by the stream that fails */
  CHECK_EQ(gemini_update_wait(mgr), GEMINI_ERR_DEVICE);
  gemini_error_info_t error = GEMINI_ERROR_INFO_INIT;
  OK(gemini_last_error(&error));
  CHECK(!strcmp(error.operation, "gemini_update_wait") && strstr(error.message, "did not run"));
  CHECK_EQ(atomic_load(&spans), 0);
  CHECK_EQ(gemini_update_wait(mgr), GEMINI_ERR_DEVICE);
  CHECK_EQ(gemini_manager_close(mgr), GEMINI_ERR_DEVICE);
}

/* The cause is that of the update's own read, however many others have failed since, and whoever met them first. */
static void test_update_after_failed_read_names_that_read(void) {
  gemini_arena_t arena;
  gemini_manager_t mgr = open_manager(1, &arena);
  gmi_manager_t *m = gmi_manager_get(mgr);
  gmi_slot_t slots[2] = { { 0 } };
  _Atomic int spans = 0;
  gmi_workers_work_done(m, &slots[0], GEMINI_ERR_IO, "the read of the update");
  gmi_workers_work_done(m, &slots[1], GEMINI_ERR_FORMAT, "the read of a norm");
  for (int update = 0; update < 2; update++) {
    struct {
      gmi_job_t job;
      gmi_slot_t *slot;
      uint64_t after;
    } *j = calloc(1, sizeof *j);
    CHECK(j);
    j->slot = &slots[!update];
    j->after = 1;
    j->job = (gmi_job_t){ .fn = count_span, .user = (void *)&spans, .slot_count = 1, .norm = !update };
    j->job.slots = &j->slot;
    j->job.after = &j->after;
    j->job.span.element_count = 1;
    gmi_workers_push(m, &j->job);
    gmi_workers_wait_slot(m, &slots[!update], 2);
    CHECK_EQ(gmi_workers_failure(m), update ? GEMINI_ERR_IO : GEMINI_OK); /* a norm's caller tells of it */
  }
  CHECK_SAYS(gmi_fail_message(), "the read of the update");
  CHECK_EQ(atomic_load(&spans), 0);
  CHECK_EQ(gemini_manager_close(mgr), GEMINI_ERR_IO);
  for (int i = 0; i < 2; i++) free(slots[i].failure_text);
}

/* ---- statistics */
static void test_stats_reset_starts_peaks_at_what_is_used(void) {
  gemini_arena_t arena;
  gemini_manager_t mgr = open_manager(1, &arena);
  figures_t s = { 0 };
  void *small, *large;
  OK(gemini_alloc(mgr, CHUNK, GEMINI_STREAM_CALLER, &small));
  OK(gemini_alloc(mgr, 5 * CHUNK, GEMINI_STREAM_CALLER, &large));
  OK(gemini_free(mgr, large, GEMINI_STREAM_CALLER));
  OK(gemini_budget_set(mgr, GEMINI_TIER_DEVICE, 2 * CHUNK)); /* idle pages are given up */
  OK(figures_read(mgr, &s));
  CHECK(s.peak_bytes[GEMINI_TIER_DEVICE] >= 6 * CHUNK && s.nonmodel_peak_bytes == 6 * CHUNK);
  OK(gemini_stats_reset(mgr));
  OK(figures_read(mgr, &s));
  CHECK_EQ(s.peak_bytes[GEMINI_TIER_DEVICE], s.used_bytes[GEMINI_TIER_DEVICE]);
  CHECK(s.used_bytes[GEMINI_TIER_DEVICE] >= CHUNK && s.used_bytes[GEMINI_TIER_DEVICE] <= 2 * CHUNK);
  CHECK_EQ(s.nonmodel_peak_bytes, CHUNK);
  OK(gemini_free(mgr, small, GEMINI_STREAM_CALLER));
  OK(gemini_manager_close(mgr));
}

/* On a machine of 2 cores both ways give one worker. */
static void test_there_are_as_many_workers_as_the_process_has_cores_to_spare(void) {
  cpu_set_t all, two;
  gemini_arena_t arena;
  CHECK(!sched_getaffinity(0, sizeof all, &all));
  CPU_ZERO(&two);
  for (size_t i = 0; i < CPU_SETSIZE && CPU_COUNT(&two) < 2; i++)
    if (CPU_ISSET(i, &all)) CPU_SET(i, &two);
  for (int restricted = 0; restricted < 2; restricted++) {
    const int cores = CPU_COUNT(restricted ? &two : &all);
    CHECK(!sched_setaffinity(0, sizeof all, restricted ? &two : &all));
    gemini_manager_t mgr = open_manager(0, &arena);
    CHECK_EQ(gmi_manager_get(mgr)->config.update_threads, cores > 256 ? 256 : cores > 1 ? cores - 1 : 1);
    OK(gemini_manager_close(mgr));
  }
  CHECK(!sched_setaffinity(0, sizeof all, &all));
}

/* ---- cores */

typedef struct {
  cpu_set_t cores; /* on which the update ran */
} seat_t;
static void take_seat(void *user, const gemini_update_span_t *span) {
  seat_t *seat = user;
  (void)span;
  CHECK(!sched_getaffinity(0, sizeof seat->cores, &seat->cores));
}

static cpu_set_t cores_of_workers(gmi_manager_t *m, uint32_t workers, const cpu_set_t *near) {
  gmi_workers_close(m);
  gmi_lock(m, "test");
  OK(gmi_workers_open(m, workers, near));
  gmi_unlock(m);
  seat_t seat;
  gmi_job_t *job = calloc(1, sizeof *job);
  CHECK(job);
  job->fn = take_seat;
  job->user = &seat;
  job->span.element_count = 1;
  gmi_workers_push(m, job);
  gmi_workers_close(m); /* which runs it first */
  OK(gmi_workers_open(m, 1, NULL));
  return seat.cores;
}

static void test_workers_run_on_the_cores_near_the_host_memory(void) {
  gemini_arena_t arena;
  gemini_manager_t mgr = open_manager(1, &arena);
  cpu_set_t all, last, got;
  CHECK(!sched_getaffinity(0, sizeof all, &all));
  size_t core = CPU_SETSIZE - 1;
  while (!CPU_ISSET(core, &all)) core--;
  CPU_ZERO(&last);
  CPU_SET(core, &last);
  got = cores_of_workers(gmi_manager_get(mgr), 1, &last);
  CHECK(CPU_EQUAL(&got, &last));
  got = cores_of_workers(gmi_manager_get(mgr), 2, &last); /* more than there are cores near */
  CHECK(CPU_EQUAL(&got, &all));
  got = cores_of_workers(gmi_manager_get(mgr), 1, NULL);
  CHECK(CPU_EQUAL(&got, &all));
  OK(gemini_manager_close(mgr));
}

int main(void) {
  RUN(test_drain_waits_for_the_jobs_before_it_and_no_others);
  RUN(test_the_rate_is_that_of_the_last_two_iterations);
  RUN(test_workers_give_way_to_other_threads);
  RUN(test_jobs_on_one_slot_run_in_their_order);
  RUN(test_what_is_used_soonest_overtakes);
  RUN(test_workers_share_a_job);
  RUN(test_update_after_failed_copy_does_not_run_and_says_so);
  RUN(test_update_after_failed_read_names_that_read);
  RUN(test_stats_reset_starts_peaks_at_what_is_used);
  RUN(test_there_are_as_many_workers_as_the_process_has_cores_to_spare);
  RUN(test_workers_run_on_the_cores_near_the_host_memory);
  return check_done();
}

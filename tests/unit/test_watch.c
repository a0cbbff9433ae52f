/* What a dump says of calls that the device keeps waiting, with a device of which each call can be held back.
 * SPDX-License-Identifier: Apache-2.0 */
#include <semaphore.h>
#include <time.h>

#include "../integration/world.h"
#include "core/manager.h"

enum { W = WORLD_CHUNK, HOST = GEMINI_TIER_HOST, DEVICE = GEMINI_TIER_DEVICE };

static const gmi_device_ops_t *real;
static gmi_device_ops_t held; /* real, with calls that wait until the test has seen them */
static sem_t seen;
static void be_seen(void) {
  while (sem_wait(&seen)) continue;
}
static gemini_status_t held_resize(void *self, uint64_t memory_bytes) {
  be_seen();
  return real->memory.resize(self, memory_bytes);
}
static gemini_status_t held_stream_destroy(void *self, uint32_t stream) {
  be_seen();
  return real->stream.destroy(self, stream);
}
static gemini_status_t held_host_lock(void *self, void *base, uint64_t size_bytes) {
  be_seen();
  return real->memory.host_lock(self, base, size_bytes);
}
static gemini_status_t held_host_unlock(void *self, void *base, uint64_t size_bytes) {
  be_seen();
  return real->memory.host_unlock(self, base, size_bytes);
}

static world_t w;
static void *shrink_device(void *user) {
  CHECK_OK(gemini_budget_set(w.mgr, DEVICE, 3 * W));
  return user;
}
static void *destroy_stream(void *user) {
  CHECK_OK(gemini_stream_destroy(w.mgr, w.stream));
  return user;
}
static void *shrink_host(void *user) {
  CHECK_OK(gemini_budget_set(w.mgr, HOST, 4 * W));
  return user;
}

static const struct {
  const char *says;
  void *(*call)(void *);
  gmi_device_ops_t ops;
} cases[] = {
  { "in gemini_budget_set(), with the manager's lock, for the device to change",
    shrink_device,
    { .memory.resize = held_resize } },
  { "in gemini_stream_destroy(), with the manager's lock, for the device to change",
    destroy_stream,
    { .stream.destroy = held_stream_destroy } },
  { "in gemini_budget_set(), with the manager's lock, for host memory",
    shrink_host,
    { .memory.host_lock = held_host_lock } },
  { "in gemini_budget_set(), with the manager's lock, for host memory",
    shrink_host,
    { .memory.host_unlock = held_host_unlock } },
};

static void test_what_the_device_keeps_waiting_is_seen(void) {
  static char text[8192];
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    w = world_open(world_config(4, 64, 0));
    gemini_tensor_t t = world_tensor(&w, world_arena(&w, GEMINI_KIND_OTHER, 1, "main", 0, 0), "t", W);
    world_fill(&w, t, 0, W, HOST, 1);
    gmi_manager_t *m = gmi_manager_get(w.mgr);
    CHECK(!sem_init(&seen, 0, 0));
    real = m->device.ops;
    held = *real;
    if (cases[i].ops.memory.resize) held.memory.resize = cases[i].ops.memory.resize;
    if (cases[i].ops.stream.destroy) held.stream.destroy = cases[i].ops.stream.destroy;
    if (cases[i].ops.memory.host_lock) held.memory.host_lock = cases[i].ops.memory.host_lock;
    if (cases[i].ops.memory.host_unlock) held.memory.host_unlock = cases[i].ops.memory.host_unlock;
    m->device.ops = &held;
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, cases[i].call, NULL), 0);
    for (int tries = 0;; tries++) { /* until the thread has come so far */
      CHECK_OK(gemini_manager_dump(w.mgr, sizeof text, text, NULL));
      if (strstr(text, cases[i].says)) break;
      if (tries == 3000) fprintf(stderr, "no \"%s\" in:\n%s", cases[i].says, text);
      CHECK(tries < 3000);
      nanosleep(&(struct timespec){ 0, 10000000 }, NULL);
    }
    CHECK(strstr(text, "chunks: 0 on the device")); /* the records can be read */
    for (int k = 0; k < 64; k++) CHECK(!sem_post(&seen));
    CHECK_EQ(pthread_join(thread, NULL), 0);
    m->device.ops = real;
    CHECK(world_holds(&w, t, 0, W, 1));
    world_close(&w);
    CHECK(!sem_destroy(&seen));
  }
}

int main(void) {
  RUN(test_what_the_device_keeps_waiting_is_seen);
  return check_done();
}

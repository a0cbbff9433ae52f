/* The fused AdamW in the spans of gemini_update(), gradients in their parameters' bytes: the bits of one call over all
 * elements, wherever the spans run. SPDX-License-Identifier: Apache-2.0 */
#include "update/gemini_update.h"
#include "world.h"

enum { ELEMENTS = 5 * 32768 + 100, STEPS = 6 }; /* more than five windows of bf16 */
enum { HOST = GEMINI_TIER_HOST, DEVICE = GEMINI_TIER_DEVICE };
enum { GRAD, MASTER, MOMENTUM, VARIANCE, PARAM, ARENAS };

typedef struct training {
  gemini_manager_t mgr;
  gemini_adamw_t adamw;
  _Atomic uint32_t spans[GEMINI_TIER_COUNT];
} training_t;
typedef struct span_call {
  gemini_adamw_t adamw;
  gemini_update_span_t span;
} span_call_t;

static void update_queued(void *user) {
  span_call_t *c = user;
  void *const *ptr = c->span.ptr;
  /* A failure shows as bits that differ. */
  (void)!gemini_adamw_host(&c->adamw, c->span.element_count, ptr[PARAM], ptr[GRAD], ptr[MASTER], ptr[MOMENTUM],
                           ptr[VARIANCE], NULL);
  free(c);
}
static void update_span(void *user, const gemini_update_span_t *span) {
  training_t *t = user;
  span_call_t *c = malloc(sizeof *c);
  CHECK(c && span->ptr[PARAM] == span->ptr[GRAD]);
  t->spans[span->tier]++;
  *c = (span_call_t){ t->adamw, *span };
  if (span->tier == HOST) {
    update_queued(c);
  } else {
    CHECK_OK(gemini_stream_call(t->mgr, span->stream, update_queued, c));
  }
}

static void test_adamw_in_spans_equals_one_call(void) {
  static float master[ELEMENTS], momentum[ELEMENTS], variance[ELEMENTS];
  static uint16_t param[ELEMENTS];
  /* On the host; in part on the device, where two windows of parameters stay; the same late; from files. */
  const struct {
    uint64_t device_windows, host_windows, file_windows;
    uint32_t flags, pinned;
  } cases[] = { { 12, 80, 0, 0, 0 },
                { 80, 80, 0, 0, 1 },
                { 80, 80, 0, GEMINI_UPDATE_LATE, 1 },
                { 8, 20, 120, GEMINI_UPDATE_LATE, 0 } };
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
    gemini_config_t config = world_config(cases[c].device_windows, cases[c].host_windows, cases[c].file_windows);
    config.update_threads = 3;
    world_t w = world_open(config);
    gemini_arena_t arenas[ARENAS];
    arenas[PARAM] = world_arena(&w, GEMINI_KIND_PARAM, 2, "param", 0, 0);
    arenas[GRAD] = world_arena(&w, GEMINI_KIND_GRAD, 2, "grad", 0, arenas[PARAM]);
    for (int i = MASTER; i <= VARIANCE; i++) {
      arenas[i] = world_arena(&w, GEMINI_KIND_MASTER + (uint32_t)(i - MASTER), 4, NULL, arenas[PARAM], 0);
    }
    gemini_tensor_t tensor = world_tensor(&w, arenas[PARAM], "all", ELEMENTS * 2), grad;
    CHECK_OK(gemini_tensor_counterpart(w.mgr, tensor, arenas[GRAD], &grad));
    if (cases[c].pinned) {
      gemini_access_t pin = world_part(arenas[PARAM], 0, 2 * WORLD_WINDOW, 0, DEVICE);
      CHECK_OK(gemini_pin(w.mgr, &pin));
    }
    memset(master, 0, sizeof master), memset(momentum, 0, sizeof momentum), memset(variance, 0, sizeof variance);
    training_t t = { .mgr = w.mgr, .adamw = GEMINI_ADAMW_INIT };
    const uint32_t modes[ARENAS] = { GEMINI_READ, GEMINI_READ_WRITE, GEMINI_READ_WRITE, GEMINI_READ_WRITE,
                                     GEMINI_WRITE };
    for (uint64_t step = 1; step <= STEPS; step++) {
      uint64_t random = step;
      uint32_t tier = step % 2 || cases[c].device_windows > 20 ? DEVICE : HOST;
      gemini_access_t a = world_whole(grad, GEMINI_WRITE, tier);
      CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      for (uint64_t i = 0; i < ELEMENTS; i++)
        ((uint16_t *)a.ptr)[i] = (uint16_t)(0x3c00 + (check_random(&random) & 0x80ff)); /* of either sign */
      CHECK_OK(gemini_adamw_host(&t.adamw, 0, NULL, NULL, NULL, NULL, NULL, NULL));     /* nothing to do is no error */
      t.adamw.step = step;
      t.adamw.grad_scale = 0.5;
      CHECK_OK(gemini_adamw_host(&t.adamw, ELEMENTS, param, a.ptr, master, momentum, variance, NULL));
      CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      gemini_update_t u = GEMINI_UPDATE_INIT;
      u.arenas = arenas;
      u.modes = modes;
      u.arena_count = ARENAS;
      u.flags = cases[c].flags;
      u.fn = update_span;
      u.user = &t;
      u.stream = w.stream;
      CHECK_OK(gemini_update(w.mgr, &u));
      CHECK_OK(gemini_update_wait(w.mgr)); /* t.adamw may change */
      a = world_whole(tensor, GEMINI_READ, HOST);
      CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      CHECK(!memcmp(a.ptr, param, sizeof param));
      CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    }
    float *const plain[] = { [MASTER] = master, [MOMENTUM] = momentum, [VARIANCE] = variance };
    for (int i = MASTER; i <= VARIANCE; i++) {
      gemini_access_t a = world_part(arenas[i], 0, sizeof master, GEMINI_READ, HOST);
      CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      CHECK(!memcmp(a.ptr, plain[i], sizeof master));
      CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    }
    CHECK((t.spans[DEVICE] > 0) == cases[c].pinned && t.spans[HOST] > 0);
    world_close(&w);
  }
}

int main(void) {
  RUN(test_adamw_in_spans_equals_one_call);
  return check_done();
}

/* Plans before a run: gemini_plan_forecast() says what a manager does with the same trace, on both sides of each budget
 * that is too small, and needs nothing that it plans for. SPDX-License-Identifier: Apache-2.0 */
#include <stdbool.h>
#include <unistd.h>

#include "../check.h"
#include "gemini.h"
#include "gemini/plan.h"

#define OK(call) CHECK_EQ(call, GEMINI_OK)
enum { LAYERS = 8, CHUNK = 65536, LAYER = 2 * CHUNK, ELEMENTS = LAYERS * LAYER / 2, CHUNKS = 8 * 2 * LAYERS };

static char path[] = "/tmp/gemini-forecast-XXXXXX";
static char said[8192];
static bool again; /* the trace has one more op, which uses the gradient of a layer in the middle */

/* A network in 16 bits with AdamW: 2 chunks of parameters a layer, as many of gradients, and 4 of each state. */
static void trace_write(uint64_t nonmodel, const char *more) {
  FILE *file = fopen(path, "w");
  CHECK(file);
  fprintf(file, "gemini-trace 1\nbudget %d 1\nrates 10000000000 8000000000 900 300\nfiles 2000000000 1000000000\n",
          CHUNK);
  fprintf(file, "outside 0\narena 0 0 2 0 0 %d param\narena 1 1 2 0 1 %d grad\n", 2 * ELEMENTS, 2 * ELEMENTS);
  fprintf(file, "arena 2 2 4 0 2 %d master\narena 3 3 4 0 3 %d momentum\n", 4 * ELEMENTS, 4 * ELEMENTS);
  fprintf(file, "arena 4 4 4 0 4 %d variance\n%s", 4 * ELEMENTS, more);
  for (int i = 0; i < 2 * LAYERS; i++) {
    int layer = i < LAYERS ? i : 2 * LAYERS - 1 - i;
    fprintf(file, "op %d 20000 %llu %llu layer%%20%d\nuse 0 %d %d 1\n", i < LAYERS ? 1 : 2,
            (unsigned long long)nonmodel, (unsigned long long)nonmodel, layer, layer * LAYER, LAYER);
    if (i >= LAYERS) fprintf(file, "use 1 %d %d 2\n", layer * LAYER + 128, LAYER - 256); /* no whole chunk */
  }
  if (again) fprintf(file, "op 2 20000 0 0 again\nuse 1 %d %d 3\n", LAYERS / 2 * LAYER + 128, LAYER - 256);
  fprintf(file, "update 0 %d 0:2 1:1 2:3 3:3 4:3\nend\n", ELEMENTS);
  CHECK(!fclose(file));
}

static gemini_config_t config_of(uint64_t device_chunks, uint64_t host_chunks) {
  gemini_config_t c = GEMINI_CONFIG_INIT;
  c.device_bytes = device_chunks * CHUNK;
  c.host_bytes = host_chunks * CHUNK;
  c.chunk_bytes = CHUNK;
  c.update_threads = 1;
  return c;
}

static gemini_forecast_t forecast(const gemini_config_t *config) {
  gemini_forecast_t f = GEMINI_FORECAST_INIT;
  uint64_t length;
  OK(gemini_plan_forecast(config, path, &f, sizeof said, said, &length));
  CHECK_EQ(strlen(said), length);
  return f;
}

typedef struct {
  gemini_manager_t mgr;
  gemini_arena_t arenas[5];
} net_t;

static net_t net_open(const gemini_config_t *config) {
  static const struct {
    const char *name;
    uint32_t kind, element_bytes;
  } kinds[] = { { "param", GEMINI_KIND_PARAM, 2 },
                { "grad", GEMINI_KIND_GRAD, 2 },
                { "master", GEMINI_KIND_MASTER, 4 },
                { "momentum", GEMINI_KIND_MOMENTUM, 4 },
                { "variance", GEMINI_KIND_VARIANCE, 4 } };
  net_t n;
  uint64_t offset;
  OK(gemini_manager_open(config, &n.mgr));
  for (int i = 0; i < 5; i++) {
    gemini_arena_config_t a = GEMINI_ARENA_CONFIG_INIT;
    a.kind = kinds[i].kind;
    a.name = kinds[i].name;
    a.element_bytes = kinds[i].element_bytes;
    a.like = i ? n.arenas[0] : NULL;
    a.capacity_bytes = (uint64_t)ELEMENTS * a.element_bytes;
    OK(gemini_arena_create(n.mgr, &a, &n.arenas[i]));
    if (!i) OK(gemini_arena_take(n.mgr, n.arenas[0], (uint64_t)2 * ELEMENTS, &offset));
  }
  return n;
}

static void adds(void *user, const gemini_update_span_t *span) {
  (void)user;
  (void)span;
}

static gemini_status_t net_update(net_t *n) {
  static const uint32_t modes[] = { GEMINI_WRITE, GEMINI_READ, GEMINI_READ_WRITE, GEMINI_READ_WRITE,
                                    GEMINI_READ_WRITE };
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.arenas = n->arenas;
  u.modes = modes;
  u.arena_count = 5;
  u.fn = adds;
  return gemini_update(n->mgr, &u);
}

static void test_forecast_is_the_plan_of_a_manager(void) {
  static const uint64_t devices[] = { 4, 6, 9, 17, 40, 200 };
  for (uint32_t placement = 0; placement < GEMINI_PLACEMENT_STATIC; placement++)
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) {
      gemini_config_t c = config_of(devices[i], CHUNKS);
      c.placement = placement;
      trace_write(0, "");
      const gemini_forecast_t f = forecast(&c);
      net_t n = net_open(&c);
      OK(gemini_trace_load(n.mgr, path));
      gemini_stats_t s = GEMINI_STATS_INIT;
      OK(gemini_stats(n.mgr, &s));
      CHECK_EQ(f.lacks, 0);
      CHECK_EQ(f.placement, placement);
      CHECK_EQ(f.step_ns, s.predicted_step_ns);
      CHECK_EQ(f.fetch_bytes, s.planned_fetch_bytes);
      CHECK_EQ(f.evict_bytes, s.planned_evict_bytes);
      CHECK_EQ(f.chunk_bytes, CHUNK);
      CHECK_EQ(f.model_bytes, (uint64_t)CHUNKS * CHUNK);
      CHECK(f.device_bytes <= c.device_bytes && f.device_bytes >= f.device_needed && f.device_bytes >= f.stays_bytes);
      CHECK_EQ(f.device_pieces + f.host_pieces, 2 * LAYERS);
      CHECK(f.step_ns >= f.compute_ns && f.stall_ns == f.step_ns - f.compute_ns);
      char text[sizeof said];
      OK(gemini_plan_explain(n.mgr, sizeof text, text, NULL));
      CHECK(!strcmp(text, said));
      OK(gemini_manager_close(n.mgr));
    }
}

static void test_all_on_the_device_moves_nothing(void) {
  gemini_config_t c = config_of(CHUNKS + 3, CHUNKS);
  c.placement = GEMINI_PLACEMENT_CUDA;
  trace_write(0, "");
  const gemini_forecast_t f = forecast(&c);
  CHECK_EQ(f.stays_bytes, f.model_bytes);
  CHECK_EQ(f.device_bytes, f.model_bytes);
  CHECK_EQ(f.fetch_bytes + f.evict_bytes + f.host_pieces, 0);
  CHECK_EQ(f.binds, GEMINI_BINDS_COMPUTE);
}

static void test_device_boundary_is_that_of_a_manager(void) {
  gemini_config_t c = config_of(1, CHUNKS);
  c.device_margin_bytes = 1000;
  trace_write(3 * CHUNK - 5, "");
  gemini_forecast_t f = forecast(&c);
  CHECK_EQ(f.lacks, 1 << GEMINI_TIER_DEVICE);
  CHECK_EQ(f.device_needed, (4 + 3) * CHUNK + 1000); /* parameters, gradients, non-model memory, margin */
  CHECK_EQ(f.step_ns + f.device_bytes + f.fetch_bytes, 0);
  CHECK_EQ(said[0], 0);
  for (int fits = 0; fits < 2; fits++) {
    c.device_bytes = f.device_needed - (fits ? 0 : 1);
    CHECK_EQ(forecast(&c).lacks, fits ? 0 : 1 << GEMINI_TIER_DEVICE);
    net_t n = net_open(&c);
    CHECK_EQ(gemini_trace_load(n.mgr, path), fits ? GEMINI_OK : GEMINI_ERR_OOM_DEVICE);
    OK(gemini_manager_close(n.mgr));
  }
}

static void test_host_boundary_is_that_of_an_update(void) {
  trace_write(0, "");
  for (int fits = 0; fits < 2; fits++) {
    gemini_config_t c = config_of(40, CHUNKS - (fits ? 0 : 1));
    c.placement = GEMINI_PLACEMENT_CPU;
    const gemini_forecast_t f = forecast(&c);
    CHECK_EQ(f.host_needed, (uint64_t)CHUNKS * CHUNK);
    CHECK_EQ(f.file_needed, 0);
    CHECK_EQ(f.lacks, fits ? 0 : 1 << GEMINI_TIER_HOST);
    CHECK(f.step_ns);
    net_t n = net_open(&c);
    CHECK_EQ(net_update(&n), fits ? GEMINI_OK : GEMINI_ERR_OOM_HOST);
    OK(gemini_manager_close(n.mgr));
  }
}

static void test_files_take_what_the_host_has_no_room_for(void) {
  gemini_config_t c = config_of(16, 20);
  c.placement = GEMINI_PLACEMENT_CPU;
  trace_write(0, "");
  c.file_bytes = (CHUNKS - 21) * CHUNK;
  gemini_forecast_t f = forecast(&c);
  CHECK_EQ(f.lacks, 1 << GEMINI_TIER_HOST | 1 << GEMINI_TIER_FILE); /* more of either will do */
  CHECK_EQ(f.file_needed, (CHUNKS - 20) * CHUNK);
  CHECK_EQ(f.host_needed, 21 * CHUNK);
  c.file_bytes += CHUNK;
  f = forecast(&c);
  CHECK_EQ(f.lacks, 0);
  CHECK(f.read_bytes > 0 && f.file_ns > 0 && f.file_bytes > 0 && f.file_bytes <= c.file_bytes);
  c.file_bytes = UINT64_C(1) << 34;
  c.host_bytes = 7 * CHUNK; /* a piece has a chunk of parameters, one of gradients, and two of each state */
  f = forecast(&c);
  CHECK_EQ(f.host_needed, 8 * CHUNK);
  CHECK_EQ(f.lacks, 1 << GEMINI_TIER_HOST);
}

/* With placement auto, states that host and files have no room for stay on the device. */
static void test_device_host_and_files_add_up(void) {
  static const struct {
    uint64_t device, host, files;
    bool fits;
  } budgets[] = { { 40, CHUNKS - 1, 0, true },
                  { 40, CHUNKS - 20, 0, true },
                  { 40, 12, CHUNKS - 32, true },
                  { 12, CHUNKS - 20, 0, false } };
  trace_write(0, "");
  for (size_t i = 0; i < sizeof budgets / sizeof *budgets; i++) {
    gemini_config_t c = config_of(budgets[i].device, budgets[i].host);
    c.file_bytes = budgets[i].files * CHUNK;
    const gemini_forecast_t f = forecast(&c);
    CHECK_EQ(!f.lacks, budgets[i].fits);
    CHECK(f.host_needed <= (CHUNKS - budgets[i].files) * CHUNK);
    if (!budgets[i].fits) CHECK_EQ(f.lacks, 1 << GEMINI_TIER_HOST);
    if (budgets[i].files) continue;
    net_t n = net_open(&c);
    CHECK_EQ(!net_update(&n), budgets[i].fits);
    OK(gemini_manager_close(n.mgr));
  }
}

static void test_zeroed_arenas_are_not_fetched(void) {
  gemini_config_t c = config_of(6, CHUNKS);
  c.placement = GEMINI_PLACEMENT_CPU;
  trace_write(0, "");
  const gemini_forecast_t f = forecast(&c);
  trace_write(0, "zeroed 1\n");
  const gemini_forecast_t zeroed = forecast(&c);
  CHECK_EQ(zeroed.fetch_bytes, f.fetch_bytes - 2 * LAYERS * CHUNK);
  CHECK_EQ(zeroed.step_ns, f.step_ns); /* the plan does not know it */
  again = true;
  trace_write(0, "zeroed 1\n");
  CHECK_EQ(forecast(&c).fetch_bytes, zeroed.fetch_bytes + LAYER); /* what is written by then is fetched */
  again = false;
  trace_write(0, "zeroed 1\n");
  net_t n = net_open(&c);
  OK(gemini_trace_load(n.mgr, path));
  OK(gemini_manager_close(n.mgr));
}

static void test_nothing_is_needed_of_what_is_planned_for(void) {
  gemini_config_t c = config_of(1 << 16, 1 << 18); /* what Valgrind has addresses for */
  c.device = GEMINI_DEVICE_CUDA;
  c.device_ordinal = 7;
  c.file_bytes = UINT64_C(1) << 38; /* and no file_dir */
  trace_write(0, "");
  gemini_forecast_t f = forecast(&c), none = GEMINI_FORECAST_INIT;
  CHECK_EQ(f.lacks, 0);
  c.chunk_bytes = 0;
  CHECK_EQ(forecast(&c).chunk_bytes, CHUNK); /* the trace's */
  c.chunk_bytes = 2 * CHUNK;
  CHECK_EQ(forecast(&c).chunk_bytes, 2 * CHUNK);
  c.file_bytes = ((UINT64_C(1) << 22) + 1) * 2 * CHUNK; /* a chunk more than there may be */
  CHECK_EQ(gemini_plan_forecast(&c, path, &none, 0, NULL, NULL), GEMINI_ERR_INVALID);
}

static void test_bad_files_are_refused_and_change_nothing(void) {
  static const char *const lines[] = { "arena 5 0 2 6 5 256 x\n", /* follows what is not there */
                                       "arena 5 9 2 5 5 256 x\n",
                                       "arena 5 0 2 5 5 255 x\n",
                                       "arena 5 0 3 5 5 256 x\n",
                                       "arena 5 0 2 5 5 256 param\n",
                                       "arena 5 0 2 0 5 4 x\n",
                                       "arena 5 0 2 5 5 9e9 x\n",
                                       "arena 5 0 2 5 5 70368744177664 x\n",
                                       "zeroed 5\n",
                                       "zeroed x\n" };
  gemini_config_t c = config_of(8, CHUNKS);
  for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
    gemini_forecast_t f = GEMINI_FORECAST_INIT, before = f;
    uint64_t length = 77;
    trace_write(0, lines[i]);
    strcpy(said, "as it was");
    CHECK_EQ(gemini_plan_forecast(&c, path, &f, sizeof said, said, &length), GEMINI_ERR_FORMAT);
    CHECK(!memcmp(&f, &before, sizeof f) && length == 77 && !strcmp(said, "as it was"));
  }
  gemini_forecast_t f = GEMINI_FORECAST_INIT;
  f.struct_size = 8;
  trace_write(0, "");
  CHECK_EQ(gemini_plan_forecast(&c, path, &f, sizeof said, said, NULL), GEMINI_ERR_INVALID);
  CHECK(!strcmp(said, "as it was"));
}

int main(void) {
  int file = mkstemp(path);
  CHECK(file >= 0 && !close(file));
  RUN(test_forecast_is_the_plan_of_a_manager);
  RUN(test_all_on_the_device_moves_nothing);
  RUN(test_device_boundary_is_that_of_a_manager);
  RUN(test_host_boundary_is_that_of_an_update);
  RUN(test_files_take_what_the_host_has_no_room_for);
  RUN(test_device_host_and_files_add_up);
  RUN(test_zeroed_arenas_are_not_fetched);
  RUN(test_nothing_is_needed_of_what_is_planned_for);
  RUN(test_bad_files_are_refused_and_change_nothing);
  CHECK(!unlink(path));
  return check_done();
}

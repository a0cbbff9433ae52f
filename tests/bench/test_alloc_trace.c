/* What a recorded training's allocations waste, against the rules of PyTorch's own allocator; and the reader of traces.
 * SPDX-License-Identifier: Apache-2.0 */
#include <unistd.h>

#include "../../bench/common/alloc_trace.h"
#include "check.h"

static const char *path_of(const char *name) { /* beside this file, in the source tree */
  static char path[512];
  const char *slash = strrchr(__FILE__, '/');
  snprintf(path, sizeof path, "%.*s../../bench/data/%s", slash ? (int)(slash - __FILE__ + 1) : 0, __FILE__, name);
  return path;
}

/* Sizes, chunks and budget are a thirty-second of what they would be on a GPU, with chunks of 2 MiB there. Alignment
 * to 512 bytes is not, which makes it harder. */
enum { SCALE = 32, CHUNK = (2 << 20) / SCALE };

static void test_trace_of_a_training_wastes_less_than_pytorchs_rules(void) {
  alloc_trace_t trace;
  char why[512];
  if (!alloc_trace_load(path_of("gpt_1.3b.trace"), SCALE, &trace, why, sizeof why)) fprintf(stderr, "%s\n", why);
  CHECK(trace.events);
  CHECK(trace.count > 10000 && trace.reserved_bytes > trace.live_peak_bytes);
  gemini_config_t c = GEMINI_CONFIG_INIT;
  c.chunk_bytes = CHUNK;
  c.device_bytes = trace.live_peak_bytes * 2 / CHUNK * CHUNK;
  c.host_bytes = 16 * CHUNK;
  c.update_threads = 1;
  uint64_t held = 0, least;
  CHECK_EQ(alloc_trace_serve(&trace, &c, &held), GEMINI_OK);
  least = alloc_trace_least(&trace, &c);
  fprintf(stderr, "    live %.1f MB; held %.4f of that, budget needed %.4f, PyTorch's rules %.4f\n",
          (double)trace.live_peak_bytes * 1e-6, (double)held / (double)trace.live_peak_bytes,
          (double)least / (double)trace.live_peak_bytes, (double)trace.reserved_bytes / (double)trace.live_peak_bytes);
  CHECK(held >= trace.live_peak_bytes && least >= trace.live_peak_bytes && least <= held);
  CHECK(held < trace.reserved_bytes); /* with room for everything */
  /* PyTorch's segments cannot become others' while a block is live in them; chunks can, all but those at the ends of
   * live blocks. So the least budget is held to half of its waste. */
  CHECK(least - trace.live_peak_bytes < (trace.reserved_bytes - trace.live_peak_bytes) / 2);
  alloc_trace_free(&trace);
}

/* ---- the reader */
static bool loads(const char *text, uint64_t scale, alloc_trace_t *trace) {
  char path[] = "/tmp/gemini.trace.XXXXXX", why[512] = "";
  int fd = mkstemp(path);
  CHECK(fd >= 0);
  CHECK_EQ(write(fd, text, strlen(text)), (ssize_t)strlen(text));
  close(fd);
  bool loaded = alloc_trace_load(path, scale, trace, why, sizeof why);
  CHECK(loaded == (*why == 0));
  unlink(path);
  return loaded;
}
static void test_trace_file_is_read_and_checked(void) {
  alloc_trace_t t;
  CHECK(loads("# text\n# reserved 4096\na 0 1000\na 2 500\nf 0\na 0 4\nf 2\n", 1, &t));
  CHECK(t.count == 5 && t.id_count == 3 && t.live_peak_bytes == 1500 && t.reserved_bytes == 4096);
  CHECK(t.events[1].id == 2 && t.events[1].size_bytes == 500 && t.events[2].id == 0 && t.events[2].size_bytes == 0);
  alloc_trace_free(&t);
  CHECK(loads("# reserved 4096\na 0 1000\na 2 3\n", 10, &t));
  CHECK(t.live_peak_bytes == 101 && t.reserved_bytes == 409 && t.events[1].size_bytes == 1);
  alloc_trace_free(&t);
  const char *const wrong[] = { "",          "# only this\n",     "a 0 0\n",       "a 0\n",  "f 0\n", "a 0 1\na 0 1\n",
                                "a 0 1 2\n", "a 0 1\nf 0\nf 0\n", "a 9999999 1\n", "x 0 1\n" };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) CHECK(!loads(wrong[i], 1, &t));
}

int main(void) {
  RUN(test_trace_of_a_training_wastes_less_than_pytorchs_rules);
  RUN(test_trace_file_is_read_and_checked);
  return check_done();
}

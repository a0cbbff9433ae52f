/* Compares copies through the CUDA device with plain copies of the driver over the same buffers, in each direction and
 * in both at the same time. SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cli.h"
#include "device/cuda_driver.h"
#include "device/device.h"
#include "row.h"

#define NAME "bench_copy"
#define MIB (UINT64_C(1) << 20)
#define FRAME_BYTES (2 * MIB) /* the least that a GPU maps */
#define PASSES_MAX 64u

enum { H2D = 1, D2H = 2, BOTH = 3 }; /* directions, as bits */

typedef struct bench {
  const gmi_device_ops_t *ops;
  const gmi_cuda_driver_t *driver;
  void *device;
  uint32_t streams[2]; /* in, out */
  cu_stream_t natives[2];
  cu_context_t context;
  unsigned char *host[2], *memory[2];
  uint64_t chunk, slots;
  bool timed;
} bench_t;

static int fail(const char *what) {
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  (void)gemini_last_error(&info);
  cli_error(NAME, "%s: %s", what, info.message[0] ? info.message : "no more is known");
  return CLI_EXIT_FAILURE;
}

/* Opens the buffers: on both sides, each piece has a frame and a page-locked range of its own, as in the library. */
static bool buffers_open(bench_t *b, uint64_t buffer_bytes) {
  uint64_t piece = b->chunk > FRAME_BYTES ? b->chunk : FRAME_BYTES;
  b->slots = (buffer_bytes / piece > 1 ? buffer_bytes / piece : 2) * (piece / b->chunk);
  for (int d = 0; d < 2; d++) {
    void *base = NULL;
    b->host[d] = mmap(NULL, b->slots * b->chunk, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b->host[d] == MAP_FAILED || b->ops->memory.reserve(b->device, b->slots * b->chunk, &base)) return false;
    madvise(b->host[d], b->slots * b->chunk, MADV_HUGEPAGE);
    memset(b->host[d], d + 1, b->slots * b->chunk);
    b->memory[d] = base;
    for (uint64_t at = 0; at < b->slots * b->chunk; at += piece) {
      uint64_t frame;
      if (b->ops->memory.frame_create(b->device, piece, &frame) ||
          b->ops->memory.map(b->device, b->memory[d] + at, frame, piece) ||
          b->ops->memory.host_lock(b->device, b->host[d] + at, piece))
        return false;
    }
  }
  return true;
}

/* Copies `bytes` in each of the directions and returns the seconds; negative: a call failed. */
static double pass(bench_t *b, bool raw, unsigned directions, uint64_t bytes) {
  uint64_t count = bytes / b->chunk > 0 ? bytes / b->chunk : 1, begin = cli_now_ns(), marks[2] = { 0, 0 };
  bool ok = true;
  for (uint64_t i = 0; i < count; i++) {
    for (unsigned d = 0; d < 2; d++) {
      if (!(directions >> d & 1)) continue;
      unsigned char *host = b->host[d] + i % b->slots * b->chunk, *memory = b->memory[d] + i % b->slots * b->chunk;
      if (raw && d == 0) {
        ok = ok && !b->driver->copy_h2d((uintptr_t)memory, host, b->chunk, b->natives[d]);
      } else if (raw) {
        ok = ok && !b->driver->copy_d2h(host, (uintptr_t)memory, b->chunk, b->natives[d]);
      } else { /* with the marks that the library needs: one to wait for, or two to measure the time */
        if (b->timed) ok = ok && !b->ops->stream.mark(b->device, b->streams[d], &marks[d]);
        ok = ok && !(d == 0 ? b->ops->queue.copy(b->device, b->streams[d], memory, host, b->chunk, GMI_COPY_H2D)
                            : b->ops->queue.copy(b->device, b->streams[d], host, memory, b->chunk, GMI_COPY_D2H));
        ok = ok && !(b->timed ? b->ops->stream.mark : b->ops->stream.mark_untimed)(b->device, b->streams[d], &marks[d]);
      }
    }
  }
  for (unsigned d = 0; d < 2; d++) {
    if (!(directions >> d & 1)) continue;
    if (raw) ok = ok && !b->ops->stream.mark(b->device, b->streams[d], &marks[d]);
    ok = ok && !b->ops->stream.sync(b->device, b->streams[d], marks[d]);
  }
  return ok ? (double)(cli_now_ns() - begin) / 1e9 : -1.0;
}

int main(int argc, char **argv) {
  bool timed = false;
  uint64_t chunk = 0, bytes = 1024 * MIB, passes = 7, ordinal = 0, buffer_bytes = 256 * MIB;
  const cli_option_t options[] = {
    { "chunk", CLI_SIZE, &chunk, "bytes of one copy; 0 = 1, 2, 4, 8, 16, 32 and 64 MiB in turn", 0, 0, NULL },
    { "bytes", CLI_SIZE, &bytes, "bytes copied in one pass, each way", 0, 0, NULL },
    { "buffer", CLI_SIZE, &buffer_bytes, "bytes of each of the four buffers", 0, 0, NULL },
    { "passes", CLI_U64, &passes, "passes of each kind, by turns; the median counts", 1, PASSES_MAX, NULL },
    { "timed", CLI_FLAG, &timed, "a timed mark before and behind each copy, instead of an untimed one behind it", 0, 0,
      NULL },
    { "gpu", CLI_U64, &ordinal, "which GPU", 0, 1000, NULL },
    { NULL, 0, NULL, NULL, 0, 0, NULL },
  };
  int status = cli_parse(NAME, "Copies through the library's device against the driver's own.", options, argc, argv);
  if (status >= 0) return status;
  if (chunk && chunk % FRAME_BYTES && FRAME_BYTES % chunk) {
    cli_error(NAME, "--chunk is %" PRIu64 ", must be a multiple or an even part of 2097152", chunk);
    return CLI_EXIT_USAGE;
  }
  static const uint64_t defaults[] = { 1, 2, 4, 8, 16, 32, 64 };
  for (size_t c = 0; c < (chunk ? 1 : sizeof defaults / sizeof *defaults); c++) {
    bench_t b = { .ops = &gmi_device_cuda, .chunk = chunk ? chunk : defaults[c] * MIB, .timed = timed };
    gmi_device_config_t config = { .ordinal = (uint32_t)ordinal, .memory_bytes = UINT64_C(1) << 40 };
    if (b.ops->open(&config, &b.device)) return fail("the GPU cannot be opened");
    b.driver = gmi_cuda_driver();
    if (b.driver->primary_retain(&b.context, (cu_device_t)ordinal) || b.driver->current_set(b.context))
      return fail("no context");
    for (int d = 0; d < 2; d++) {
      void *native;
      if (b.ops->stream.create(b.device, false, &b.streams[d]) || b.ops->stream.native(b.device, b.streams[d], &native))
        return fail("no stream");
      b.natives[d] = native;
    }
    if (!buffers_open(&b, buffer_bytes)) return fail("no buffers");
    double seconds[BOTH + 1][2][PASSES_MAX];
    for (uint64_t p = 0; p <= passes; p++) { /* the first pass warms up */
      for (unsigned directions = H2D; directions <= BOTH; directions++) {
        for (unsigned turn = 0; turn < 2; turn++) {
          unsigned raw = turn ^ (unsigned)(p & 1);
          double took = pass(&b, raw, directions, bytes);
          if (took < 0) return fail("a copy failed");
          if (p) seconds[directions][raw][p - 1] = took;
        }
      }
    }
    double rates[BOTH + 1][2];
    for (unsigned directions = H2D; directions <= BOTH; directions++) {
      uint64_t count = bytes / b.chunk > 0 ? bytes / b.chunk : 1;
      for (unsigned raw = 0; raw < 2; raw++) {
        cli_sort(seconds[directions][raw], passes);
        rates[directions][raw] =
            (double)(count * b.chunk) * (directions == BOTH ? 2 : 1) / seconds[directions][raw][passes / 2];
      }
    }
    row_t row;
    row_begin(&row, NAME, timed ? "timed" : "pinned");
    row_value(&row, rates[BOTH][0], "bytes/s");
    row_ratio(&row, rates[BOTH][0] / rates[BOTH][1], "the driver's own copies over the same buffers");
    row_u64(&row, "chunk", b.chunk);
    row_u64(&row, "bytes", bytes);
    row_f64(&row, "h2d", rates[H2D][0]);
    row_f64(&row, "h2d_ratio", rates[H2D][0] / rates[H2D][1]);
    row_f64(&row, "d2h", rates[D2H][0]);
    row_f64(&row, "d2h_ratio", rates[D2H][0] / rates[D2H][1]);
    row_f64(&row, "both", rates[BOTH][0]);
    row_f64(&row, "both_ratio", rates[BOTH][0] / rates[BOTH][1]);
    if (!row_end(&row)) return CLI_EXIT_FAILURE;
    b.driver->current_set(NULL);
    b.ops->close(b.device);
    b.driver->primary_release((cu_device_t)ordinal);
    for (int d = 0; d < 2; d++) munmap(b.host[d], b.slots * b.chunk);
  }
  return CLI_EXIT_OK;
}

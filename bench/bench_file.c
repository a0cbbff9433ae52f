/* Measures the throughput of the file tier's block store: blocks of one size are written and read in random order,
 * several at a time. SPDX-License-Identifier: Apache-2.0
 *
 * Every block is written once before the clock runs, so that no pass finds space that was never written. CPU seconds
 * are those of the process, in user and kernel mode. bench_file.sh compares with fio. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/uio.h>

#include "base/status.h"
#include "cli.h"
#include "io/store.h"
#include "row.h"

#define PROGRAM "bench_file"
enum { MAX_DEPTH = 256, MAX_ROUNDS = 99 };

typedef struct options {
  const char *dir, *engine, *checksum, *direction;
  uint64_t size_bytes, chunk_bytes, depth, rounds, seed;
} options_t;

typedef struct bench {
  options_t o;
  gmi_store_t *store;
  uint32_t *order; /* blocks */
  uint32_t count;
  gmi_block_request_t requests[MAX_DEPTH];
  uint8_t *buffers;
  bool write;
  pthread_mutex_t lock; /* guards the rest */
  pthread_cond_t over;
  uint32_t next, under_way; /* position in `order` of the block to submit next; requests under way */
  bool failed;
} bench_t;

/* Prepares the request for the next block; false: none is left. The lock is held. */
static bool refill(bench_t *b, gmi_block_request_t *request) {
  if (b->next == b->count || b->failed) return false;
  uint8_t *buffer = b->buffers + (uint64_t)(request - b->requests) * b->o.chunk_bytes;
  *request = (gmi_block_request_t){ .block = b->order[b->next++],
                                    .write = b->write,
                                    .urgent = !b->write,
                                    .buffer = buffer,
                                    .done = request->done,
                                    .user = b };
  b->under_way++;
  return true;
}

static void done(gmi_block_request_t *request) {
  bench_t *b = request->user;
  pthread_mutex_lock(&b->lock);
  if (request->io.status && !b->failed) cli_error(PROGRAM, "%s", request->message);
  b->failed |= request->io.status != GEMINI_OK;
  b->under_way--;
  bool more = refill(b, request);
  if (!b->under_way) pthread_cond_signal(&b->over);
  pthread_mutex_unlock(&b->lock);
  if (more) gmi_store_submit(b->store, request);
}

/* One pass over all blocks. */
static bool pass(bench_t *b, bool write) {
  pthread_mutex_lock(&b->lock);
  b->write = write;
  b->next = 0;
  for (uint32_t i = 0; i < b->o.depth; i++) {
    b->requests[i].done = done;
    if (!refill(b, &b->requests[i])) break;
    pthread_mutex_unlock(&b->lock); /* done takes it, and may be called here */
    gmi_store_submit(b->store, &b->requests[i]);
    pthread_mutex_lock(&b->lock);
  }
  while (b->under_way) pthread_cond_wait(&b->over, &b->lock);
  pthread_mutex_unlock(&b->lock);
  return !b->failed;
}

static double cpu_s(void) {
  struct rusage use;
  getrusage(RUSAGE_SELF, &use);
  return (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
         (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec) * 1e-6;
}

static bool measure(bench_t *b, uint32_t engine, bool checksum) {
  gmi_store_config_t config = { .directories = b->o.dir,
                                .block_bytes = b->o.chunk_bytes,
                                .block_count = b->count,
                                .engine_kind = engine,
                                .checksum = checksum };
  if (gmi_store_open(&config, &b->store)) {
    cli_error(PROGRAM, "%s", gmi_fail_message());
    return false;
  }
  (void)gmi_store_buffer_add(b->store, b->buffers, b->o.depth * b->o.chunk_bytes);
  uint64_t random = b->o.seed * 2 + 1;
  bool fine = true;
  for (uint32_t i = 0; i < b->count && fine; i++) fine = gmi_store_take(b->store, &b->order[i]) == GEMINI_OK;
  for (uint32_t i = b->count; i-- > 1;) {
    random ^= random >> 12, random ^= random << 25, random ^= random >> 27;
    uint32_t j = (uint32_t)(random * UINT64_C(2685821657736338717) % (i + 1)), swap = b->order[i];
    b->order[i] = b->order[j];
    b->order[j] = swap;
  }
  double rate[2][MAX_ROUNDS], cpu[2][MAX_ROUNDS], gib = (double)b->count * (double)b->o.chunk_bytes / 0x1p30;
  fine = fine && pass(b, true);
  for (uint64_t round = 0; round < b->o.rounds && fine; round++) {
    for (int write = 1; write >= 0 && fine; write--) {
      if (b->o.direction && strcmp(b->o.direction, write ? "write" : "read") != 0) continue;
      uint64_t begin = cli_now_ns();
      double cpu_begin = cpu_s();
      fine = pass(b, write);
      rate[write][round] = gib * 0x1p30 / ((double)(cli_now_ns() - begin) * 1e-9);
      cpu[write][round] = (cpu_s() - cpu_begin) / gib;
    }
  }
  gmi_store_figures_t figures;
  gmi_store_figures(b->store, &figures);
  gmi_store_close(b->store);
  for (int write = 1; write >= 0 && fine; write--) {
    if (b->o.direction && strcmp(b->o.direction, write ? "write" : "read") != 0) continue;
    cli_sort(rate[write], b->o.rounds);
    cli_sort(cpu[write], b->o.rounds);
    row_t row;
    row_begin(&row, PROGRAM, write ? "write" : "read");
    row_value(&row, rate[write][b->o.rounds / 2], "B/s");
    row_f64(&row, write ? "write_bytes_per_s" : "read_bytes_per_s", rate[write][b->o.rounds / 2]);
    row_f64(&row, "cpu_seconds_per_gib", cpu[write][b->o.rounds / 2]);
    row_text(&row, "engine", figures.engine.kind == GMI_ENGINE_URING ? "uring" : "threads");
    row_text(&row, "checksum", checksum ? "on" : "off");
    row_text(&row, "features", figures.engine.features);
    row_text(&row, "note", figures.note);
    row_u64(&row, "direct", figures.direct);
    row_u64(&row, "chunk_bytes", b->o.chunk_bytes);
    row_u64(&row, "depth", b->o.depth);
    row_u64(&row, "size_bytes", b->count * b->o.chunk_bytes);
    row_u64(&row, "rounds", b->o.rounds);
    fine = row_end(&row);
  }
  return fine;
}

/* Runs each combination in the lists of options, which are separated by commas; returns the exit status. */
static int each(bench_t *b) {
  static const struct {
    const char *name;
    uint32_t kind;
  } engines[] = { { "uring", GMI_ENGINE_URING }, { "threads", GMI_ENGINE_THREADS } };
  for (const char *e = b->o.engine; *e; e += strcspn(e, ",") + (e[strcspn(e, ",")] == ',')) {
    uint32_t kind = GMI_ENGINE_AUTO;
    for (int i = 0; i < 2; i++)
      if (strcspn(e, ",") == strlen(engines[i].name) && !strncmp(e, engines[i].name, strlen(engines[i].name)))
        kind = engines[i].kind;
    if (kind == GMI_ENGINE_AUTO) {
      cli_error(PROGRAM, "bad value of --engine: %s, expected uring, threads or both with a comma", b->o.engine);
      return CLI_EXIT_USAGE;
    }
    for (const char *c = b->o.checksum; *c; c += strcspn(c, ",") + (c[strcspn(c, ",")] == ',')) {
      bool on = !strncmp(c, "on", 2) && strcspn(c, ",") == 2, off = !strncmp(c, "off", 3) && strcspn(c, ",") == 3;
      if (!on && !off) {
        cli_error(PROGRAM, "bad value of --checksum: %s, expected on, off or both with a comma", b->o.checksum);
        return CLI_EXIT_USAGE;
      }
      if (!measure(b, kind, on)) return CLI_EXIT_FAILURE;
    }
  }
  return 0;
}

int main(int argc, char **argv) {
  static bench_t b;
  b.o = (options_t){ .dir = "/tmp",
                     .engine = "uring,threads",
                     .checksum = "off,on",
                     .size_bytes = UINT64_C(1) << 30,
                     .chunk_bytes = UINT64_C(4) << 20,
                     .depth = 8,
                     .rounds = 3,
                     .seed = 1 };
  const cli_option_t table[] = {
    { "dir", CLI_STRING, &b.o.dir, "directory, or several separated by ':'", 0, 0, NULL },
    { "size", CLI_SIZE, &b.o.size_bytes, "bytes in all", 0, 0, NULL },
    { "chunk", CLI_SIZE, &b.o.chunk_bytes, "bytes of a block, a multiple of 4 KiB", 0, 0, NULL },
    { "depth", CLI_U64, &b.o.depth, "blocks under way at once", 1, MAX_DEPTH, NULL },
    { "engine", CLI_STRING, &b.o.engine, "uring, threads, or both with a comma", 0, 0, NULL },
    { "checksum", CLI_STRING, &b.o.checksum, "on, off, or both with a comma", 0, 0, NULL },
    { "direction", CLI_STRING, &b.o.direction, "read or write alone; default: both", 0, 0, NULL },
    { "rounds", CLI_U64, &b.o.rounds, "passes each way, of which the median counts", 1, MAX_ROUNDS, NULL },
    { "seed", CLI_U64, &b.o.seed, "of the order of blocks", 0, 0, NULL },
    { 0 },
  };
  int status = cli_parse(PROGRAM, "Measures blocks written to and read from files.", table, argc, argv);
  if (status >= 0) return status;
  uint64_t count = b.o.chunk_bytes ? b.o.size_bytes / b.o.chunk_bytes : 0;
  if (!count || b.o.chunk_bytes % 4096 || count >= GMI_BLOCK_NONE) {
    cli_error(PROGRAM, "bad --size and --chunk: %llu bytes in chunks of %llu, expected at least one of whole 4 KiB",
              (unsigned long long)b.o.size_bytes, (unsigned long long)b.o.chunk_bytes);
    return CLI_EXIT_USAGE;
  }
  b.count = (uint32_t)count;
  b.order = calloc(count, sizeof *b.order);
  b.buffers = aligned_alloc(2 << 20, (b.o.depth * b.o.chunk_bytes + (2 << 20) - 1) / (2 << 20) * (2 << 20));
  if (!b.order || !b.buffers) {
    cli_error(PROGRAM, "no memory for %llu buffers of %llu bytes", (unsigned long long)b.o.depth,
              (unsigned long long)b.o.chunk_bytes);
    return CLI_EXIT_FAILURE;
  }
  memset(b.buffers, 0xa5, b.o.depth * b.o.chunk_bytes);
  pthread_mutex_init(&b.lock, NULL);
  pthread_cond_init(&b.over, NULL);
  status = each(&b);
  free(b.order);
  free(b.buffers);
  return status;
}

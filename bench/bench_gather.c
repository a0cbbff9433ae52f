/* Compares what the library gathers and sums over ranks with a plain ring of copies and collectives over as many chunks,
 * through the same device and communicator. Each rank is a process.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A pass of the library is an iteration: operators that acquire one chunk of sharded parameters each, then operators
 * that take one chunk of gradients each and make it ready, then an update, which is not timed. A pass of the ring copies
 * this rank's slice into a frame and gathers it there, frame after frame; then sums frames and copies the slice back. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "chunk/group.h"
#include "chunk/residency.h"
#include "chunk/shard.h"
#include "cli.h"
#include "core/streams.h"
#include "gemini/group.h"
#include "row.h"

#define NAME "bench_gather"
#define MIB (UINT64_C(1) << 20)
enum { RANKS_MAX = 64, PASSES_MAX = 64, WARM_UP = 4 /* passes until plans have settled */ };
enum { GATHER, SUM, KINDS };

typedef struct {
  uint64_t ranks, chunk, chunks, frames, passes, bucket;
  uint32_t device;
  bool registers;
  const char *timeline; /* or NULL */
} options_t;
typedef struct {
  const options_t *o;
  uint32_t rank;
  gemini_manager_t mgr;
  gemini_stream_t stream;
  gemini_group_t group;
  gemini_arena_t params, grads;
  gemini_tensor_t *param, *grad; /* [chunks] */
  uint8_t *ring, *host;          /* the ring's frames and this rank's slices, of the bench's own */
  uint64_t host_bytes;
  gmi_fence_t *done; /* [frames] behind the last use of each frame of the ring */
} rank_t;

static int fail(const rank_t *k, const char *what) {
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  (void)gemini_last_error(&info);
  cli_error(NAME, "rank %" PRIu32 ": %s: %s", k->rank, what, info.message[0] ? info.message : "no more is known");
  return CLI_EXIT_FAILURE;
}

/* The byte that a rank's part of a chunk is filled with. */
static uint8_t byte_of(uint64_t chunk, uint64_t rank) { return (uint8_t)(1 + chunk * 7 + rank * 31); }

static bool fill(rank_t *k, gemini_tensor_t tensor, uint64_t chunk) {
  gemini_access_t range = { .struct_size = sizeof(gemini_access_t), .tier = GEMINI_TIER_HOST, .mode = GEMINI_WRITE };
  range.object.tensor = tensor;
  uint64_t offset, size;
  for (uint64_t next = 0;; next = offset + size) {
    if (gemini_slice_next(k->mgr, &range, next, &offset, &size)) return false;
    if (!size) return true;
    gemini_access_t slice = range;
    slice.offset_bytes = offset;
    slice.size_bytes = size;
    if (gemini_acquire(k->mgr, &slice, 1, GEMINI_STREAM_CALLER)) return false;
    memset(slice.ptr, byte_of(chunk, k->rank), size);
    if (gemini_release(k->mgr, &slice, 1, GEMINI_STREAM_CALLER)) return false;
  }
}

static bool open_arenas(rank_t *k) {
  gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
  c.element_bytes = 2;
  c.group = k->group;
  c.zero_stage = GEMINI_ZERO_AUTO;
  if (gemini_arena_create(k->mgr, &c, &k->params)) return false;
  c.group = NULL;
  c.kind = GEMINI_KIND_GRAD;
  c.reuse = k->params;
  c.dtype = GEMINI_DTYPE_BF16;
  if (gemini_arena_create(k->mgr, &c, &k->grads)) return false;
  for (uint64_t i = 0; i < k->o->chunks; i++) {
    char name[32];
    snprintf(name, sizeof name, "chunk %" PRIu64, i);
    if (gemini_tensor_register(k->mgr, k->params, name, k->o->chunk, GEMINI_OFFSET_NEXT, &k->param[i]) ||
        gemini_tensor_counterpart(k->mgr, k->param[i], k->grads, &k->grad[i]) || !fill(k, k->param[i], i))
      return false;
  }
  return true;
}

/* Memory for the ring's slices: page-locked as a whole, as a GPU's copy must lie within one lock. */
static bool open_host(rank_t *k) {
  gmi_manager_t *m = gmi_manager_get(k->mgr);
  k->host_bytes = k->o->chunks * (k->o->chunk / k->o->ranks + k->o->chunk % k->o->ranks + 65536);
  void *host = mmap(NULL, k->host_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (host == MAP_FAILED) return false;
  k->host = host;
  return !m->device.ops->memory.host_lock(m->device.self, host, k->host_bytes);
}
static bool close_host(rank_t *k) {
  gmi_manager_t *m = gmi_manager_get(k->mgr);
  return !m->device.ops->memory.host_unlock(m->device.self, k->host, k->host_bytes) && !munmap(k->host, k->host_bytes);
}

/* The manager has frames for both rings: the bench's own, and as many for what is gathered, beside a chunk of
 * parameters and one of gradients. */
static bool open_rank(rank_t *k, const gemini_group_id_t *id) {
  const options_t *o = k->o;
  gemini_config_t c = GEMINI_CONFIG_INIT;
  gemini_group_config_t group = GEMINI_GROUP_CONFIG_INIT;
  void *ring;
  c.device = o->device ? GEMINI_DEVICE_CUDA : GEMINI_DEVICE_SIMULATED;
  c.device_ordinal = o->device ? k->rank : 0;
  c.chunk_bytes = o->chunk;
  c.placement = GEMINI_PLACEMENT_CPU; /* slices stay on the host, from where the ring takes its own, too */
  c.device_bytes = (3 * o->frames + 4) * o->chunk;
  c.host_bytes = (o->chunks + 8) * o->chunk;
  group.id = id;
  group.rank = k->rank;
  group.ranks = (uint32_t)o->ranks;
  if (o->registers) group.flags = GEMINI_GROUP_REGISTER;
  group.bucket_bytes = o->bucket;
  k->param = calloc(o->chunks, sizeof *k->param);
  k->grad = calloc(o->chunks, sizeof *k->grad);
  k->done = calloc(o->frames, sizeof *k->done);
  if (!k->param || !k->grad || !k->done || gemini_manager_open(&c, &k->mgr) ||
      gemini_stream_create(k->mgr, &k->stream) || gemini_group_open(k->mgr, &group, &k->group) || !open_arenas(k) ||
      gemini_alloc(k->mgr, o->frames * o->chunk, k->stream, &ring) || !open_host(k))
    return false;
  k->ring = ring;
  return true;
}

static bool meet(rank_t *k) { return !gemini_group_exchange(k->mgr, k->group, NULL, 0, NULL); }

/* ---- the library's pass */
static void nothing(void *user, const gemini_update_span_t *span) { (void)user, (void)span; }

/* Looks at a gathered chunk on the simulated device: each rank's part at its begin. False: it is not what was there. */
static bool right(const rank_t *k, const uint8_t *bytes, uint64_t chunk) {
  bool same = true;
  for (uint32_t r = 0; r < k->o->ranks && !k->o->device; r++) {
    const gmi_slicing_t s = gmi_slicing_of(k->o->chunk, 2, r, (uint32_t)k->o->ranks);
    same = same && bytes[s.start * 2] == byte_of(chunk, r) && bytes[(s.start + s.own) * 2 - 1] == byte_of(chunk, r);
  }
  return same;
}

static bool forward(rank_t *k, uint64_t chunk, bool look) {
  char name[32];
  gemini_access_t use = { .struct_size = sizeof(gemini_access_t), .tier = GEMINI_TIER_DEVICE, .mode = GEMINI_READ };
  use.object.tensor = k->param[chunk];
  snprintf(name, sizeof name, "forward %" PRIu64, chunk);
  if (gemini_op_begin(k->mgr, name, k->stream) || gemini_acquire(k->mgr, &use, 1, k->stream)) return false;
  if (look && (gemini_stream_synchronize(k->mgr, k->stream) || !right(k, use.ptr, chunk))) return false;
  return !gemini_release(k->mgr, &use, 1, k->stream) && !gemini_op_end(k->mgr);
}
static bool backward(rank_t *k, uint64_t chunk) {
  char name[32];
  gemini_access_t use = { .struct_size = sizeof(gemini_access_t), .tier = GEMINI_TIER_DEVICE, .mode = GEMINI_WRITE };
  use.object.tensor = k->grad[chunk];
  snprintf(name, sizeof name, "backward %" PRIu64, chunk);
  return !gemini_op_begin(k->mgr, name, k->stream) && !gemini_acquire(k->mgr, &use, 1, k->stream) &&
         !gemini_release(k->mgr, &use, 1, k->stream) &&
         !gemini_tensor_state_set(k->mgr, k->grad[chunk], GEMINI_STATE_READY_FOR_REDUCE) && !gemini_op_end(k->mgr);
}

/* Waits for what the streams of the links and the group have queued. */
static bool wait_for_links(rank_t *k) {
  gmi_manager_t *m = gmi_manager_get(k->mgr);
  gmi_lock(m, NAME);
  gmi_group_t *g = gmi_group_get(m, k->group);
  const uint32_t streams[] = { gmi_link_in(m)->stream, g->gather_stream, g->reduce_stream, gmi_link_out(m)->stream };
  gemini_status_t status = GEMINI_OK;
  for (int i = 0; i < 4 && !status; i++) {
    gmi_fence_t end = 0;
    status = gmi_fence_now(m, streams[i], &end);
    if (!status) status = gmi_fence_sync(m, end);
  }
  gmi_unlock(m);
  return !status;
}

static bool library_pass(rank_t *k, bool look, double seconds[KINDS]) {
  gemini_update_t u = GEMINI_UPDATE_INIT;
  if (!meet(k) || gemini_iteration_begin(k->mgr)) return false;
  uint64_t begin_ns = cli_now_ns();
  for (uint64_t i = 0; i < k->o->chunks; i++)
    if (!forward(k, i, look)) return false;
  if (gemini_stream_synchronize(k->mgr, k->stream) || !wait_for_links(k)) return false;
  seconds[GATHER] = 1e-9 * (double)(cli_now_ns() - begin_ns);
  if (!meet(k)) return false;
  begin_ns = cli_now_ns();
  for (uint64_t i = k->o->chunks; i-- > 0;)
    if (!backward(k, i)) return false;
  if (gemini_stream_synchronize(k->mgr, k->stream) || !wait_for_links(k)) return false;
  seconds[SUM] = 1e-9 * (double)(cli_now_ns() - begin_ns);
  u.arenas = (const gemini_arena_t[]){ k->params, k->grads };
  u.modes = (const uint32_t[]){ GEMINI_WRITE, GEMINI_READ };
  u.arena_count = 2;
  u.stream = k->stream;
  u.fn = nothing;
  if (gemini_update(k->mgr, &u) || gemini_update_wait(k->mgr) || gemini_iteration_end(k->mgr)) return false;
  for (uint64_t i = 0; look && i < k->o->chunks; i++) /* the sums have taken the bytes */
    if (!fill(k, k->param[i], i)) return false;
  return true;
}

/* ---- the ring's pass, with the manager's lock */
static gemini_status_t ring_gathers(rank_t *k, gmi_manager_t *m, gmi_group_t *g, const gmi_slicing_t *s) {
  const uint32_t in = gmi_link_in(m)->stream;
  const uint64_t own = s->own * 2, slice = s->slice * 2;
  gemini_status_t status = GEMINI_OK;
  for (uint64_t i = 0; i < k->o->chunks && !status; i++) {
    uint8_t *frame = k->ring + i % k->o->frames * k->o->chunk;
    gmi_fence_t ready = 0, *done = &k->done[i % k->o->frames];
    status = gmi_fence_wait(m, in, *done);
    if (!status)
      status =
          m->device.ops->queue.copy(m->device.self, in, frame + s->start * 2, k->host + i * own, own, GMI_COPY_H2D);
    if (!status) status = gmi_fence_now(m, in, &ready);
    if (!status) status = gmi_fence_wait(m, g->gather_stream, ready);
    if (!status) status = gmi_group_gather(m, g, frame, slice, s->rest * 2, "ring", (uint32_t)i, done);
  }
  return status;
}
static gemini_status_t ring_sums(rank_t *k, gmi_manager_t *m, gmi_group_t *g, const gmi_slicing_t *s) {
  const uint32_t out = gmi_link_out(m)->stream;
  const uint64_t own = s->own * 2;
  gemini_status_t status = GEMINI_OK;
  for (uint64_t i = 0; i < k->o->chunks && !status; i++) {
    uint8_t *frame = k->ring + i % k->o->frames * k->o->chunk;
    gmi_fence_t ready = 0, *done = &k->done[i % k->o->frames];
    status = gmi_fence_wait(m, g->reduce_stream, *done);
    if (!status)
      status = gmi_group_reduce(m, g, (void *[]){ frame }, 1, s->slice, GEMINI_DTYPE_BF16, "ring", (uint32_t)i);
    if (!status && s->rest)
      status = gmi_group_reduce_rest(m, g, frame + s->slice * 2 * k->o->ranks, s->rest, GEMINI_DTYPE_BF16, "ring",
                                     (uint32_t)i);
    if (!status) status = gmi_fence_now(m, g->reduce_stream, &ready);
    if (!status) status = gmi_fence_wait(m, out, ready);
    if (!status)
      status =
          m->device.ops->queue.copy(m->device.self, out, k->host + i * own, frame + s->start * 2, own, GMI_COPY_D2H);
    if (!status) status = gmi_fence_now(m, out, done);
  }
  return status;
}
static bool ring_pass(rank_t *k, double seconds[KINDS]) {
  gmi_manager_t *m = gmi_manager_get(k->mgr);
  const gmi_slicing_t s = gmi_slicing_of(k->o->chunk, 2, k->rank, (uint32_t)k->o->ranks);
  for (int kind = 0; kind < KINDS; kind++) {
    if (!meet(k)) return false;
    const uint64_t begin_ns = cli_now_ns();
    gmi_lock(m, NAME);
    gmi_group_t *g = gmi_group_get(m, k->group);
    gemini_status_t status = kind == GATHER ? ring_gathers(k, m, g, &s) : ring_sums(k, m, g, &s);
    gmi_unlock(m);
    if (status || !wait_for_links(k)) return false;
    seconds[kind] = 1e-9 * (double)(cli_now_ns() - begin_ns);
  }
  return true;
}

/* ---- a rank */
static bool print_row(const rank_t *k, double rates[2][KINDS]) {
  const options_t *o = k->o;
  gemini_group_stats_t g = GEMINI_GROUP_STATS_INIT;
  if (gemini_group_stats(k->mgr, k->group, &g)) return false;
  row_t row;
  row_begin(&row, NAME, o->device ? "cuda" : "sim");
  row_value(&row, rates[0][GATHER], "bytes/s");
  row_ratio(&row, rates[0][GATHER] / rates[1][GATHER], "a ring of copies and all-gathers in the same run");
  row_u64(&row, "ranks", o->ranks);
  row_u64(&row, "chunk", o->chunk);
  row_u64(&row, "chunks", o->chunks);
  row_u64(&row, "frames", o->frames);
  row_u64(&row, "bucket_chunks", g.bucket_chunks);
  row_u64(&row, "gathered_bytes", g.gathered_bytes);
  row_u64(&row, "planned_gathered_bytes", g.planned_gathered_bytes);
  row_u64(&row, "slices_fetched_bytes", g.fetched_bytes);
  row_f64(&row, "raw", rates[1][GATHER]);
  row_f64(&row, "reduce", rates[0][SUM]);
  row_f64(&row, "reduce_raw", rates[1][SUM]);
  row_f64(&row, "reduce_ratio", rates[0][SUM] / rates[1][SUM]);
  return row_end(&row);
}

/* One more pass of the library, which the first rank records. */
static bool timeline_pass(rank_t *k) {
  double took[KINDS];
  if (!k->rank && gemini_timeline_start(k->mgr, k->o->timeline)) return false;
  return library_pass(k, false, took) && (k->rank || !gemini_timeline_stop(k->mgr));
}

static int run_rank(const options_t *o, uint32_t rank, const gemini_group_id_t *id) {
  rank_t k = { .o = o, .rank = rank };
  static double seconds[2][KINDS][PASSES_MAX];
  double rates[2][KINDS], took[KINDS];
  if (!open_rank(&k, id)) return fail(&k, "cannot start");
  for (uint64_t p = 0; p < WARM_UP + o->passes; p++) {
    for (uint64_t turn = 0; turn < 2; turn++) {
      const bool ring = turn ^ (p & 1);
      if (!(ring ? ring_pass(&k, took) : library_pass(&k, p < 2, took)))
        return fail(&k, ring ? "the ring failed" : "a pass failed, or gathered what no rank has");
      for (int kind = 0; kind < KINDS && p >= WARM_UP; kind++) seconds[ring][kind][p - WARM_UP] = took[kind];
    }
  }
  if (o->timeline && !timeline_pass(&k)) return fail(&k, "no timeline");
  for (int ring = 0; ring < 2; ring++)
    for (int kind = 0; kind < KINDS; kind++) {
      cli_sort(seconds[ring][kind], o->passes);
      rates[ring][kind] = (double)(o->chunks * o->chunk) / seconds[ring][kind][o->passes / 2];
    }
  if (!meet(&k) || (!rank && !print_row(&k, rates))) return fail(&k, "cannot print");
  if (gemini_free(k.mgr, k.ring, k.stream) || !close_host(&k) || gemini_manager_close(k.mgr))
    return fail(&k, "cannot close");
  free(k.param);
  free(k.grad);
  free(k.done);
  return CLI_EXIT_OK;
}

int main(int argc, char **argv) {
  static const char *const devices[] = { "sim", "cuda", NULL };
  options_t o = { .ranks = 2, .chunk = 16 * MIB, .chunks = 32, .frames = 8, .passes = 7 };
  const cli_option_t table[] = {
    { "ranks", CLI_U64, &o.ranks, "processes, each with a device", 1, RANKS_MAX, NULL },
    { "chunk", CLI_SIZE, &o.chunk, "of what is gathered, a power of two", 65536, UINT64_C(1) << 30, NULL },
    { "chunks", CLI_U64, &o.chunks, "in a pass", 1, 100000, NULL },
    { "frames", CLI_U64, &o.frames, "of the ring; the library has as many beside what its operators use", 1, 1000,
      NULL },
    { "register", CLI_FLAG, &o.registers, "the frames that the library gathers into, with NCCL", 0, 0, NULL },
    { "bucket", CLI_SIZE, &o.bucket, "of gradients that the library adds together", 0, UINT64_C(1) << 34, NULL },
    { "passes", CLI_U64, &o.passes, "of each kind, by turns; the median counts", 1, PASSES_MAX, NULL },
    { "timeline", CLI_STRING, &o.timeline, "write a timeline of one more pass of the first rank to this file", 0, 0,
      NULL },
    { "device", CLI_CHOICE, &o.device, "simulated ones, over shared memory, or GPUs, over NCCL", 0, 0, devices },
    { NULL, 0, NULL, NULL, 0, 0, NULL },
  };
  int status =
      cli_parse(NAME, "Gathers and sums of the library against a ring of copies and collectives.", table, argc, argv);
  if (status >= 0) return status;
  if (o.chunk & (o.chunk - 1)) {
    cli_error(NAME, "--chunk is %" PRIu64 ", must be a power of two", o.chunk);
    return CLI_EXIT_USAGE;
  }
  rank_t first = { .o = &o };
  gemini_group_id_t id;
  pid_t children[RANKS_MAX] = { 0 };
  const pid_t parent = getpid();
  if (gemini_group_id_make(o.device ? GEMINI_TRANSPORT_NCCL : GEMINI_TRANSPORT_SHARED, (uint32_t)o.ranks, &id))
    return fail(&first, "no group");
  for (uint32_t rank = 1; rank < o.ranks; rank++) {
    children[rank] = fork();
    if (children[rank] < 0) {
      while (--rank > 0) kill(children[rank], SIGKILL);
      cli_error(NAME, "cannot start rank %" PRIu32, rank);
      return CLI_EXIT_FAILURE;
    }
    if (children[rank] == 0) {
      if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent) _exit(CLI_EXIT_FAILURE);
      return run_rank(&o, rank, &id);
    }
  }
  status = run_rank(&o, 0, &id);
  for (uint32_t rank = 1; rank < o.ranks; rank++) {
    int end = 0;
    if (status != CLI_EXIT_OK) kill(children[rank], SIGKILL);
    if (waitpid(children[rank], &end, 0) != children[rank] || end != 0) status = CLI_EXIT_FAILURE;
  }
  return status;
}

/* Policy: turns the description of one iteration into a plan of fetches and evictions. Called by src/tracer,
 * and by chunk/cut.c for the chunk size. SPDX-License-Identifier: Apache-2.0
 *
 * Every function is pure: no I/O, no clock, no device, no globals. The same input gives the same output in every
 * process. The caller owns every array.
 *
 * The model. An iteration is the ops 0..n-1 and repeats forever. Op i needs all its chunks on the device while it runs.
 * Frames are interchangeable. Op i also needs ops[i].heap_frames frames for non-model memory, so at most frame_count -
 * heap_frames chunks can be resident during op i. After op p.after_op, piece p of the optimizer runs, on one of two
 * sides:
 *  - on the host: the piece needs its *shared* chunks (gradient and low-precision parameter) on the host. Their device
 *    copies are written back and dropped after their last use; the next use fetches them again;
 *  - on the device: the piece needs its shared chunks and its *state* chunks (master, momentum, variance) on the
 *    device.
 * State chunks that no op touches and whose pieces all run on the host never visit the device. If the host lacks room
 * for all state chunks, the states of as many pieces as necessary are read from files for each update and written back,
 * and those of device pieces stay on the device for good; if files lack room, too, there are as many device pieces as
 * that takes, or as fit.
 *
 * Stages. An op and the device pieces after it, in order of piece index, follow one another on the compute stream. Each
 * of them is a stage. The frames that non-model memory holds during the op stay taken during the pieces after it. The
 * device pieces of an op run before its host pieces take their chunks. A chunk may belong to several pieces, on both
 * sides; a host piece then needs its state chunks on the host too. A pinned chunk never moves, whatever its pieces
 * need. Behind the last stage, nothing runs on the compute stream for outside_ns; then the last op's host pieces are
 * submitted.
 *
 * A host piece may be computed *ahead*: beside ops, from an earlier one on, into spare slots of the host. The results
 * take the place of the old values after its op; nothing sees them before.
 *
 * A host piece may run in two *passes*: the first one computes the shared chunks alone, which an op then may fetch, the
 * second one the states, when the workers have nothing else to do. Together they take longer than one. The first pass
 * may be computed ahead as well, the second one then comes after the piece's op.
 *
 * The plan covers one iteration and repeats: the chunks resident at its begin are resident at its end. */
#ifndef GMI_POLICY_H
#define GMI_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "gemini/plan.h"

typedef struct gmi_plan_op {
  uint64_t compute_ns;   /* time on the stream, without waits for chunks */
  uint32_t heap_frames;  /* peak of the frames under non-model memory in this op */
  uint32_t access_first; /* index of its first access; the accesses end where the next op's begin */
} gmi_plan_op_t;

enum {
  GMI_ACCESS_READ = 1,
  GMI_ACCESS_WRITE = 2,
  GMI_ACCESS_FRESH = 4 /* the whole chunk is overwritten before it is read: it needs a frame, but no fetch */
};
typedef struct gmi_plan_access {
  uint32_t chunk;
  uint32_t mode; /* GMI_ACCESS_*, not 0. Each chunk appears at most once per op, in ascending order */
} gmi_plan_access_t;

typedef struct gmi_plan_piece {
  uint32_t after_op;    /* submitted when this op has ended; less than op_count */
  uint32_t chunk_first; /* index into piece_chunks; ends where the next piece begins. Shared chunks come first */
  uint32_t shared_count;
  /* That its new values take while it is computed ahead; 0: it cannot be. Nor can it if one of its chunks is used after
   * ahead_op, or by another piece, or in a group. */
  uint32_t ahead_slots;
  uint32_t ahead_op; /* it can be computed ahead when this op has ended; at most after_op */
  /* Spare slots that its two passes take, as the second one reads the gradients once more, or before that for what the
   * first one writes ahead. */
  uint32_t pass_slots;
  uint64_t host_ns;             /* duration on all host workers together */
  uint64_t result_ns, state_ns; /* likewise, of its two passes; 0: it cannot have two */
  uint64_t device_ns;           /* duration on the device when nothing else runs */
} gmi_plan_piece_t;

/* What a group of ranks does with a chunk that they share: a gather, or the sum of gradients. Of the chunk, this rank
 * keeps the slice that lies in parts, which are chunks of the plan. A gather copies the slice to the device, unless its
 * parts are there, and then brings the others'; a sum brings this rank's slice from the device behind it. */
enum { GMI_PLAN_PARTS = 2 };
#define GMI_NO_OP UINT32_MAX
typedef struct gmi_plan_collective {
  uint32_t op;     /* a gather is queued as this op begins, a sum when it has ended */
  uint32_t use_op; /* gather: the op that waits for it, op or a later one. sum: op */
  uint32_t
      frame_op; /* gather: the op, before op, whose end frees the frame; GMI_NO_OP: the frame is new. sum: GMI_NO_OP */
  uint32_t group; /* below group_count */
  uint32_t part_count, reserved;
  uint32_t parts[GMI_PLAN_PARTS];
  uint64_t part_bytes[GMI_PLAN_PARTS]; /* 0: the part is zero, and is not copied */
  uint64_t bytes;                      /* of a gather: received from other ranks; of a sum: sent to them */
} gmi_plan_collective_t;
/* A group's two links. All chunks that ranks share are equally large. */
typedef struct gmi_plan_group {
  uint64_t gather_ns, sum_ns; /* of one chunk, when all ranks are there */
} gmi_plan_group_t;
/* Gathers and sums in the order in which they are queued, so op never falls, and neither does use_op. Frames of
 * gathered chunks, and of gradients that wait for their sum, are among heap_frames. */
typedef struct gmi_plan_groups {
  uint32_t gather_count, sum_count, group_count, reserved;
  const gmi_plan_collective_t *gathers, *sums;
  const gmi_plan_group_t *links; /* [group_count] */
} gmi_plan_groups_t;

enum { GMI_PLACEMENTS = GEMINI_PLACEMENT_STATIC + 1 }; /* how many there are */
typedef struct gmi_plan_input {
  uint32_t op_count, chunk_count, frame_count, piece_count;
  const gmi_plan_op_t *ops; /* [op_count + 1]; of the last, only access_first is set: the number of accesses */
  const gmi_plan_access_t *accesses;
  const gmi_plan_piece_t *pieces; /* [piece_count + 1]; of the last, only chunk_first is set */
  const uint32_t *piece_chunks;
  const uint8_t *chunk_kind; /* [chunk_count] GEMINI_KIND_* */
  uint64_t chunk_bytes, frame_bytes;
  uint64_t link_bytes, file_bytes; /* bytes that a copy of one chunk moves over the links, and to or from a file */
  uint64_t fetch_ns, evict_ns;     /* duration of one chunk's copy, host to device and device to host */
  uint64_t outside_ns;             /* from the end of an iteration's last stage to the begin of the next iteration */
  /* from the end of a piece's work until its results count as done: each worker finishes other work first */
  uint64_t host_delay_ns;
  uint32_t host_slots; /* chunks that fit on the host; set only when not all bytes must fit there. 0: all chunks fit */
  /* pieces whose states may be read, updated and written at the same time when the states are in files */
  uint32_t host_pieces_ahead;
  uint32_t spare_slots; /* of the host, for the new values of pieces that are computed ahead or have two passes */
  uint64_t file_read_ns, file_write_ns; /* duration of one chunk; reads and writes share the bandwidth of the files */
  uint32_t placement;                   /* GEMINI_PLACEMENT_*, below GMI_PLACEMENTS */
  uint32_t home_slots; /* chunks that fit on the host and in files together; with AUTO the states of as many pieces stay
                        * on the device as have no room there. 0: all chunks fit */
  uint32_t pieces_apart; /* 1: device pieces overlap with ops; 0: they take turns with ops, as on one stream */
  double static_param_fraction, static_optim_fraction;
  const uint8_t *chunk_pinned; /* [chunk_count] or NULL; 1: the user pinned the chunk to the device */
  /* [chunk_count] or NULL; 1: the chunk has a slot of the host, which is spare as well if the plan has the chunk, a
   * state, stay on the device for good */
  const uint8_t *chunk_has_slot;
  gmi_plan_groups_t groups;
} gmi_plan_input_t;
/* The most chunks of a piece. */
static inline uint32_t gmi_plan_largest_piece(const gmi_plan_input_t *input) {
  uint32_t largest = 0;
  for (uint32_t i = 0; i < input->piece_count; i++) {
    const uint32_t chunks = input->pieces[i + 1].chunk_first - input->pieces[i].chunk_first;
    if (chunks > largest) largest = chunks;
  }
  return largest;
}

/* RESULTS: the first one of its two passes. */
enum { GMI_AHEAD_NONE, GMI_AHEAD_ALL, GMI_AHEAD_RESULTS };

#define GMI_NO_PIECE UINT32_MAX
typedef struct gmi_plan_move {
  uint32_t chunk;
  uint32_t op; /* fetch: issue when this op begins; evict: issue when this op has ended */
  /* GMI_NO_PIECE, or a device piece after op: issue when that piece begins (fetch) or has ended (evict) */
  uint32_t piece;
  uint32_t use_op; /* fetch: the op that needs the chunk; if it lies before op, it is the next iteration's. evict: 0 */
  /* fetch: GMI_NO_PIECE, or the device piece after use_op that needs the chunk. evict: GMI_NO_PIECE */
  uint32_t use_piece;
  uint32_t flags; /* evict: GMI_EVICT_*; fetch: 0 */
} gmi_plan_move_t;
enum {
  GMI_EVICT_DIRTY = 1,     /* the chunk must be written back */
  GMI_EVICT_FOR_UPDATE = 2 /* the chunk leaves because a host piece needs it */
};

/* A plan. Invariants: fetch_first and evict_first ascend and end with the number of moves; every access that needs
 * bytes finds its chunk resident if the moves are carried out in order; no stage has more resident chunks than
 * frames. */
typedef struct gmi_plan_traffic { /* of a group in one iteration, bytes */
  uint64_t gathered;              /* received from other ranks */
  uint64_t summed;                /* sent to other ranks */
  uint64_t fetched, stored;       /* own slices, to the device for gathers, and from sums to where slices are */
} gmi_plan_traffic_t;

typedef struct gmi_plan {
  uint32_t op_count, chunk_count, piece_count;
  uint32_t worst_op; /* the op that waits longest for chunks, in the op itself or in its device pieces */
  /* in issue order, which is the order of need: by op; within an op first those issued at its begin, then those of
   * its device pieces in order of index */
  gmi_plan_move_t *fetches;
  uint32_t *fetch_first;      /* [op_count + 1] into fetches */
  gmi_plan_move_t *evicts;    /* sorted by op, within an op like fetches */
  uint32_t *evict_first;      /* [op_count + 1] */
  uint8_t *piece_on_device;   /* [piece_count] */
  uint8_t *piece_ahead;       /* [piece_count] GMI_AHEAD_*: what of a host piece is computed ahead */
  uint8_t *piece_passes;      /* [piece_count] 1: a host piece that has two passes, unless it is done before its op */
  uint8_t *resident_at_start; /* [chunk_count] 1: on the device, or being fetched, when the iteration begins */
  uint8_t *stays;             /* [chunk_count] 1: never leaves the device under this plan */
  /* [accesses] the op with the chunk's next access (by the op or a device piece after it); + op_count if that is in
   * the next iteration; UINT32_MAX if the chunk must leave for the host before its next access */
  uint32_t *next_use;
  /* [piece_count] the next op that uses one of the piece's shared chunks, in the same encoding; the workers run the
   * ready piece with the smallest value first */
  uint32_t *piece_use;
  uint64_t fetch_count; /* chunks fetched per iteration */
  /* the fewest fetches possible with this assignment of pieces to host and device, by Belady's MIN; a proven lower
   * bound of it where the search was cut short (docs/policy.md) */
  uint64_t optimum_count;
  uint64_t evict_dirty_count;
  uint64_t device_piece_count;
  uint64_t predicted_ns; /* duration of one iteration in the steady state; at least each of the busy times below */
  /* busy time of each resource in one iteration; of gathers and sums, those of the group that takes longest. compute:
   * all stages, and outside_ns */
  uint64_t compute_ns, fetch_busy_ns, evict_busy_ns, update_busy_ns, file_busy_ns, gather_busy_ns, sum_busy_ns;
  uint64_t file_chunks;        /* chunks read from files per iteration; as many are written */
  uint64_t worst_stall_ns;     /* stall in worst_op */
  gmi_plan_traffic_t *traffic; /* [groups.group_count] */
} gmi_plan_t;

typedef struct gmi_plan_failure { /* says why gmi_plan_make() returned GEMINI_ERR_OOM_DEVICE */
  uint32_t op;                    /* the first op whose working set does not fit */
  uint32_t reserved;
  uint64_t need_frames, have_frames;
} gmi_plan_failure_t;

/* Makes a plan. plan_out is filled on GEMINI_OK only; the caller frees it by gmi_plan_free().
 * @retval GEMINI_ERR_OOM_DEVICE the chunks and non-model frames of an op exceed frame_count (under STATIC: beside the
 *   requested fractions); *failure_out names the op
 * @retval GEMINI_ERR_INVALID    the input contradicts itself, has no op, has 2^30 ops or chunks or more, 2^31 accesses
 *   or more, or times whose sum exceeds 2^59 ns
 * @retval GEMINI_ERR_OOM_SYSTEM no memory for the planner's tables */
gemini_status_t gmi_plan_make(const gmi_plan_input_t *input, gmi_plan_t *plan_out, gmi_plan_failure_t *failure_out);
void gmi_plan_free(gmi_plan_t *plan);

/* Predicts the duration of an iteration under a plan: simulates the compute stream, both links, the files and the
 * update workers over several iterations until the steady state. Fills predicted_ns, the other *_ns fields and
 * worst_op of plan. gmi_plan_make() has called it already; call it again after op times or rates were measured anew.
 * GEMINI_ERR_INVALID: the plan was not made from this input. */
gemini_status_t gmi_plan_simulate(const gmi_plan_input_t *input, gmi_plan_t *plan);

/* The resource that is busy for longest, and so limits the iteration: GEMINI_BINDS_*. */
uint32_t gmi_plan_binds(const gmi_plan_t *plan);

/* Writes the plan as text, terminated by NUL, with snprintf's rules: text may be NULL if size_bytes is 0, and the
 * return value is the full length without the NUL. op_names may be NULL. */
uint64_t gmi_plan_explain(const gmi_plan_input_t *input, const gmi_plan_t *plan, const char *const *op_names,
                          char *text, uint64_t size_bytes);

/* Searches the chunk size. A use is a byte range that one op touches; uses of one op are adjacent in the array and
 * have the same op. Offsets lie in an address space in which arenas start at multiples of max_bytes. Of the powers
 * of two in [min_bytes, max_bytes], the result minimises the predicted copy time of an iteration in which every op
 * fetches everything it touches: chunks touched x (overhead_ns + chunk / rate). The constraint: twice the largest op
 * must fit in device_bytes - nonmodel_bytes. The largest such size wins ties. If no size meets the constraint, the
 * result is min_bytes. */
typedef struct gmi_chunk_use {
  uint64_t offset, size_bytes;
  uint32_t op, reserved;
} gmi_chunk_use_t;
typedef struct gmi_chunk_search {
  const gmi_chunk_use_t *uses;
  uint64_t use_count;
  uint64_t min_bytes, max_bytes; /* of a chunk, whose frame and whose copies are as large; powers of two */
  uint64_t device_bytes, nonmodel_bytes;
  uint64_t overhead_ns; /* of one copy, including mapping the chunk */
  uint64_t bytes_per_s; /* rate of the slower link */
} gmi_chunk_search_t;
uint64_t gmi_chunk_size_search(const gmi_chunk_search_t *search);

/* ---- gathers of sharded arenas
 *
 * Chooses before which op each chunk is gathered, for a number of frames at each op, and which gathered chunk leaves
 * for it: as early as the frames and `ahead` allow, and of the chunks that are in the way, the one with the furthest
 * next use leaves (Belady, "A study of replacement algorithms", 1966). At the begin no chunk is gathered. An op with
 * more chunks than frames is *on demand*: nothing is gathered before it, and its own chunks are when it acquires them
 * and leave when it ends. The result depends on the input alone, so ranks with equal inputs gather in the same order.
 *
 * Ahead: a driver holds about 1,000 entries for a stream, and makes the calling thread wait when there are more. The
 * copy of one slice takes up to five. Copies that wait for updates on the host must not keep the next operator from
 * being queued, as those of 427 chunks once did (bench/results/2026-11-28-ranks-h200.md).
 * Burst: to queue a gather takes the calling thread up to 0.3 ms where cores are busy, and the operator is queued
 * behind those of its begin. Batch: to queue one takes about as long as to queue several together (as in
 * chunk/collectives.c), so those of later operators wait until there are some. */
enum { GMI_GATHERS_AHEAD = 128, GMI_GATHERS_BURST = 32, GMI_GATHERS_BATCH = 8 };
typedef struct gmi_gather_input {
  uint32_t op_count, chunk_count;
  const uint32_t *frames;    /* [op_count] for gathered chunks, from the op's begin to that of the next */
  const uint32_t *use_first; /* [op_count + 1] an op's first use in uses */
  const uint32_t *uses;      /* chunks, below chunk_count; those of one op all differ */
  uint32_t ahead;            /* gathered chunks which no op has used yet, at most, beside the op's own; 0: no limit */
  uint32_t burst;            /* chunks gathered ahead at one op, at most; 0: no limit */
  uint32_t batch;            /* and at least, or half of those that then wait for their use; 0: no limit. Both do not
                              * hold for what the next op that uses any chunk needs */
  bool stays;                /* what is gathered never leaves, also not behind an op on demand */
} gmi_gather_input_t;
typedef struct gmi_gather_event {
  uint32_t chunk;
  bool leaves; /* the chunk leaves the device; else it is gathered */
} gmi_gather_event_t;
typedef struct gmi_gather_plan {
  uint32_t *event_first; /* [op_count + 1] the first of the events at an op's begin; the op's own gathers come first */
  gmi_gather_event_t *events;
  uint32_t *gathered; /* [op_count] chunks that are gathered behind these events; of an op on demand none of its own */
  bool *on_demand;    /* [op_count] */
} gmi_gather_plan_t;
/* OOM_SYSTEM: no memory. The caller frees the plan. */
gemini_status_t gmi_gather_plan_make(const gmi_gather_input_t *input, gmi_gather_plan_t *plan_out);
void gmi_gather_plan_free(gmi_gather_plan_t *plan);

#endif

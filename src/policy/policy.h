/* Policy: pure functions from a description of an iteration to a plan. No I/O, no clock, no device, no globals; the
 * same input gives the same output in every process. Callers own every array.
 *
 * The model. An iteration is ops 0..n-1, repeated for ever. Op i needs all its chunks on the device while it runs.
 * Frames are interchangeable. Op i also needs heap_frames[i] frames for non-model memory, so that at most
 * frame_count - heap_frames[i] chunks can be resident in op i. After op p.after_op, piece p of the optimizer runs:
 *  - on the host: it needs its *shared* chunks (gradient and low-precision parameter) on the host, so their device
 *    copies are written back after their last use and dropped; the next use fetches them;
 *  - on the device: it needs its shared chunks and its *state* chunks (master, momentum, variance) there.
 * State chunks that no op touches and whose pieces all run on the host never visit the device. Where the host has no
 * room for all of them, those of as many pieces as must are read from files for each update and written back.
 *
 * Steps. An op and each device piece after it, in order of piece index, follow one another on the compute stream; each
 * is a step, and the frames that non-model memory holds in the op stay taken in the pieces after it. The device pieces
 * of an op run before its host pieces take their chunks. A chunk may belong to several pieces, on both sides; a host
 * piece then needs its state chunks on the host too. A pinned chunk never moves, whatever its pieces need.
 *
 * The plan is one iteration long and repeats: what is resident when it begins is resident when it ends. */
#ifndef GMI_POLICY_H
#define GMI_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "gemini.h"

typedef struct gmi_plan_op {
  uint64_t compute_ns;   /* stream time without waits for chunks */
  uint32_t heap_frames;  /* frames that non-model memory occupies at its peak in this op */
  uint32_t access_first; /* into accesses; an op's accesses end where the next op's begin */
} gmi_plan_op_t;

enum {
  GMI_ACCESS_READ = 1,
  GMI_ACCESS_WRITE = 2,
  GMI_ACCESS_FRESH = 4 /* the whole chunk is overwritten before it is read: needs a frame but no fetch */
};
typedef struct gmi_plan_access {
  uint32_t chunk;
  uint32_t mode; /* GMI_ACCESS_*, not 0; each chunk at most once an op, ascending chunk order */
} gmi_plan_access_t;

typedef struct gmi_plan_piece {
  uint32_t after_op;    /* submitted when this op has ended, op_count - 1 at most */
  uint32_t chunk_first; /* into piece_chunks; ends where the next piece begins. Shared chunks come first */
  uint32_t shared_count;
  uint32_t reserved;
  uint64_t host_ns;   /* on all host workers together */
  uint64_t device_ns; /* alone on the device */
} gmi_plan_piece_t;

typedef struct gmi_plan_input {
  uint32_t op_count, chunk_count, frame_count, piece_count;
  const gmi_plan_op_t *ops; /* [op_count + 1]; the last holds only access_first = number of accesses */
  const gmi_plan_access_t *accesses;
  const gmi_plan_piece_t *pieces; /* [piece_count + 1]; the last holds only chunk_first */
  const uint32_t *piece_chunks;
  const uint8_t *chunk_kind; /* [chunk_count] GEMINI_KIND_* */
  uint64_t chunk_bytes, frame_bytes;
  uint64_t link_bytes, file_bytes; /* that a copy of a chunk moves over the links, and into or out of a file */
  uint64_t fetch_ns, evict_ns;     /* one chunk over each link */
  uint64_t host_delay_ns;     /* from a piece's work to its being current: the workers share in it as they come free */
  uint32_t host_slots;        /* chunks that the host tier has room for when there are files below it; 0: for all */
  uint32_t host_pieces_ahead; /* pieces that are read, updated and written at once when their states are in files */
  uint64_t file_read_ns, file_write_ns; /* one chunk; both share what the files can do */
  uint32_t placement;                   /* GEMINI_PLACEMENT_* */
  uint32_t pieces_apart;                /* 1: device pieces run beside ops; 0: in turn with them, as on one stream */
  double static_param_fraction, static_optim_fraction;
  const uint8_t *chunk_pinned; /* [chunk_count] or NULL: 1 = held on the device by the user */
} gmi_plan_input_t;

#define GMI_NO_PIECE UINT32_MAX
typedef struct gmi_plan_move {
  uint32_t chunk;
  uint32_t op;        /* fetch: issue when this op begins. evict: issue when this op has ended */
  uint32_t piece;     /* GMI_NO_PIECE. Otherwise a device piece after op: issue when that piece begins or has ended */
  uint32_t use_op;    /* fetch: the op that needs it (in the next iteration if that lies before op). evict: 0 */
  uint32_t use_piece; /* fetch: GMI_NO_PIECE, or the device piece after use_op that needs it. evict: GMI_NO_PIECE */
  uint32_t flags;     /* evict: GMI_EVICT_* ; fetch: 0 */
} gmi_plan_move_t;
enum { GMI_EVICT_DIRTY = 1 /* must be written back */, GMI_EVICT_FOR_UPDATE = 2 /* because a host piece needs it */ };

typedef struct gmi_plan {
  uint32_t op_count, chunk_count, piece_count;
  uint32_t worst_op;          /* waits longest for chunks, itself or in its device pieces */
  gmi_plan_move_t *fetches;   /* in issue order, which is the order of need: by op, then those at the op's begin, then
                                those of its device pieces in order of index */
  uint32_t *fetch_first;      /* [op_count + 1] into fetches */
  gmi_plan_move_t *evicts;    /* sorted by op, then as fetches */
  uint32_t *evict_first;      /* [op_count + 1] */
  uint8_t *piece_on_device;   /* [piece_count] */
  uint8_t *resident_at_start; /* [chunk_count] 1 = on the device (or arriving) when the iteration begins */
  uint8_t *stays;             /* [chunk_count] 1 = never leaves the device under the plan */
  uint32_t *next_use;         /* [accesses] op of the same chunk's next access, + op_count when in the next iteration,
                                UINT32_MAX when there is none before it must leave for the host */
  uint32_t *piece_use;        /* [piece_count] alike, of its shared chunks: workers take the least first */
  uint64_t fetch_count;       /* chunks fetched an iteration */
  uint64_t optimum_count;     /* the fewest possible with these pieces on these places: Belady's MIN. Where the search
                                for it was cut short (docs/policy.md) a proven lower bound of it */
  uint64_t evict_dirty_count;
  uint64_t device_piece_count;
  uint64_t predicted_ns; /* of one iteration in the steady state; at least each of the five busy times */
  uint64_t compute_ns, fetch_busy_ns, evict_busy_ns, update_busy_ns, file_busy_ns; /* of that iteration */
  uint64_t file_chunks;    /* read, and written, in an iteration */
  uint64_t stall_ns;       /* predicted_ns - compute_ns */
  uint64_t worst_stall_ns; /* of worst_op */
} gmi_plan_t;

typedef struct gmi_plan_failure { /* why GEMINI_ERR_OOM_DEVICE */
  uint32_t op;                    /* the first op whose working set does not fit */
  uint32_t reserved;
  uint64_t need_frames, have_frames;
} gmi_plan_failure_t;

/* Makes a plan. @retval GEMINI_ERR_OOM_DEVICE: an op's chunks and non-model frames exceed frame_count (or, under
 * STATIC, do so beside the fractions asked for); *failure_out says which. GEMINI_ERR_INVALID: the input contradicts
 * itself, has no op, more than 2^30 ops or chunks or 2^31 accesses, or times whose sum passes 2^59 ns.
 * GEMINI_ERR_OOM_SYSTEM. plan_out is filled on GEMINI_OK only; end it with gmi_plan_free(). */
gemini_status_t gmi_plan_make(const gmi_plan_input_t *input, gmi_plan_t *plan_out, gmi_plan_failure_t *failure_out);
void gmi_plan_free(gmi_plan_t *plan);

/* The step time that a plan leads to, by simulating compute stream, both links and the update workers over iterations
 * until the steady state; fills predicted_ns, the *_ns fields of plan and worst_op. gmi_plan_make() has done it
 * already; call it again when op times or rates were measured anew. GEMINI_ERR_INVALID: the plan is not of this
 * input. */
gemini_status_t gmi_plan_simulate(const gmi_plan_input_t *input, gmi_plan_t *plan);

/* Writes the plan in words and ends it with a NUL as snprintf does: text may be NULL when size_bytes is 0, and the
 * length needed, without the NUL, is returned. op_names may be NULL. */
uint64_t gmi_plan_explain(const gmi_plan_input_t *input, const gmi_plan_t *plan, const char *const *op_names,
                          char *text, uint64_t size_bytes);

/* Chunk size search. A use is a byte range touched in one op; uses of one op are adjacent and share op. Ranges are
 * offsets in an address space where arenas start at multiples of max_bytes. Picks the power of two in
 * [min_bytes, max_bytes] that minimises predicted copy time of an iteration if every op fetched what it touches:
 * chunks touched x (overhead_ns + chunk / rate), subject to the largest op plus as much again fitting in
 * device_bytes - nonmodel_bytes; the largest such size wins ties. If none satisfies the constraint: min_bytes. */
typedef struct gmi_chunk_use {
  uint64_t offset, size_bytes;
  uint32_t op, reserved;
} gmi_chunk_use_t;
typedef struct gmi_chunk_search {
  const gmi_chunk_use_t *uses;
  uint64_t use_count;
  uint64_t min_bytes, max_bytes; /* of a chunk, whose frame and whose copies are as large; powers of two */
  uint64_t device_bytes, nonmodel_bytes;
  uint64_t overhead_ns; /* of one copy and its mapping */
  uint64_t bytes_per_s; /* of the slower link */
} gmi_chunk_search_t;
uint64_t gmi_chunk_size_search(const gmi_chunk_search_t *search);

#endif

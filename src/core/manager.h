/* The manager and the records that all modules share.
 * SPDX-License-Identifier: Apache-2.0
 *
 * gmi_manager.lock guards every field that is not marked Atomic or Constant. Acquire and release of resident tensors do
 * not take it: they change only the counts (and a tensor's state) in the atomic words of tensors and chunks, while the
 * flags of these words change under the lock; for a part of a tensor they also take the lock of one lease table. User
 * callbacks and the log callback run without the lock.
 *
 * Lock order. A thread that holds one of these locks may take only locks further down:
 *   1. gmi_manager.lock           the manager's records
 *   2. gmi_manager.hook.lock      frees that hooks have put aside
 *   3. gmi_watch.lock             the list of waits; every blocking wait takes it at its begin and its end
 *   4. gmi_workers.lock           the queue of update and norm jobs
 *   5. gmi_lease_table.lock and the tracer's touch_lock
 * The locks inside src/device, src/io and src/host are taken under any of these. The modules that own them call back
 * with none of them held, except the heap of host blocks, which decommits memory under its own lock. Outside fork(),
 * the static locks of handles.c and hook.c are taken alone. gmi_reading_begin() tries lock 1, without blocking, before
 * it takes lock 3. */
#ifndef GMI_MANAGER_H
#define GMI_MANAGER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#include "base/handle.h"
#include "base/status.h"
#include "core/lease.h"
#include "core/observer.h"
#include "core/stats.h"
#include "core/watch.h"
#include "device/device.h"
#include "gemini.h"

/* ---- handles: bits [63:60] type, [59:42] manager (entry in the table of managers, low bits of its serial number),
 * [41:0] object.
 * The object bits hold the object's index (as many bits as the type needs) and, above it, a generation that counts the
 * objects that have had this index. Generations never restart, not even in a later manager with equal manager bits, so
 * a stale handle never matches a newer object. An index whose generations are used up is retired. */
enum {
  GMI_HANDLE_MANAGER = 1,
  GMI_HANDLE_ARENA = 2,
  GMI_HANDLE_TENSOR = 3,
  GMI_HANDLE_STREAM = 4,
  GMI_HANDLE_GRAPH = 5,
  GMI_HANDLE_GROUP = 6
};
#define GMI_MANAGERS 64u
#define GMI_ARENAS 1024u
#define GMI_TENSORS (1u << 24)
#define GMI_GRAPHS 256u
#define GMI_GROUPS 16u
#define GMI_NONE UINT32_MAX
#define GMI_HANDLE_OBJECT_BITS 42
#define GMI_HANDLE_MANAGER_MASK UINT64_C(0x0ffffc0000000000)
enum {
  GMI_ARENA_INDEX_BITS = 10,
  GMI_TENSOR_INDEX_BITS = 24,
  GMI_STREAM_INDEX_BITS = 6,
  GMI_GRAPH_INDEX_BITS = 8,
  GMI_GROUP_INDEX_BITS = 4
};
#define GMI_TENSOR_GENERATIONS ((1u << (GMI_HANDLE_OBJECT_BITS - GMI_TENSOR_INDEX_BITS)) - 1) /* 1 to this */
static inline uint64_t gmi_object_id(const gemini_access_t *access) { return gmi_id(access->object.tensor); }

/* ---- fences and streams */
/* The stream index that stands for GEMINI_STREAM_CALLER (the calling thread instead of a stream). */
#define GMI_CALLER GMI_NONE

/* Fences behind the latest uses of a chunk, for at most GMI_USES streams. When all entries belong to other streams with
 * unfinished work, a further stream first waits for one of these and replaces its fence: the new fence then covers both
 * uses. Atomic: gmi_chunk_use() writes an entry with a compare-and-swap before it drops the chunk's user count; readers
 * see it because they read the count (acquire) first. */
enum { GMI_USES = 2 };
typedef struct gmi_uses {
  _Atomic gmi_fence_t fence[GMI_USES];
} gmi_uses_t;

typedef struct gmi_chunk gmi_chunk_t; /* chunk/chunk.h */
typedef struct gmi_io gmi_io_t;

/* The frame mapped at a chunk's address. The mapping outlives residency, so a chunk that gets the same frame back, as
 * it does in each iteration of a plan, needs no remap. */
typedef struct gmi_mapping {
  uint32_t frame_1; /* index of the frame + 1; 0 = none */
  uint32_t reserved;
  gmi_fence_t left; /* behind the last queued work that uses the address; set when the chunk loses its frame */
} gmi_mapping_t;

/* ---- host slots: host memory for one chunk each. Pending work on the bytes is recorded in the slot, not in the chunk,
 * so that the next owner of the slot waits for it too.
 *
 * work_queued counts the updates, norms and transfers that were queued on the slot, work_done those that have finished;
 * all are finished when both are equal. A thread that finishes work increments work_done with release order after its
 * last access to the bytes; readers load it with acquire order before they touch the bytes. Devices wait for it in
 * stream order (wait_flag). failure is stored before that increment and is therefore visible to the same readers. */
typedef struct gmi_slot {
  gmi_chunk_t *chunk;         /* owner, or NULL */
  gmi_fence_t fence;          /* behind the queued copies that read or write the slot */
  _Atomic uint64_t work_done; /* Atomic: see above; at most work_queued */
  uint64_t work_queued;
  _Atomic gemini_status_t failure; /* Atomic: of the last read from a file into the slot */
  char *failure_text; /* its cause, owned; NULL: not known. Guarded by the workers' lock while the slot has work, else
                       * by the manager's */
  bool block;         /* the slot holds heap blocks instead of a chunk */
  bool blank;         /* nothing has used the slot since its memory was committed: it reads as zeros */
  bool spare;         /* it holds new values that are speculated (chunk/speculate.c), and no chunk */
} gmi_slot_t;

enum { GMI_UPDATED = 1024 };
typedef struct gmi_host {
  struct gmi_reserve *reserve;
  struct gmi_ahead *ahead; /* parts that are prepared ahead of their use */
  uint8_t *base;
  _Atomic uint64_t used; /* Atomic: bytes of slots */
  uint64_t grain_bytes, part_bytes, part_count;
  uint64_t *committed; /* [part_count] bytes at the start of each part that are committed and page-locked */
  gmi_slot_t *slots;   /* address space for the largest number of slots */
  uint64_t *free_map;  /* bit per slot, set while the slot is free */
  uint64_t slot_map_bytes, free_map_bytes;
  uint64_t home_end;                     /* index of the slot behind the last home slot */
  uint32_t slot_count, free_count, hand; /* slots within the budget */
  uint32_t slot_most;                    /* slots that may hold chunks; more than slot_count after the budget shrank */
  struct gmi_host_heap *heap;            /* NULL until the first heap block */
  uint32_t block_slots, reserved2;       /* slots that may hold heap blocks */
  uint32_t spare_count, spare_hand; /* slots with values that are speculated; where the search for another begins */
  bool spare_looked;                /* gmi_host_spare_reclaim() has been called in this iteration */
  bool spare_reserved[7];
  uint64_t own_peak[2]; /* most bytes used by others than these: in this iteration, or since the manager was opened, and
                         * in the one before */
  uint64_t updated_first, updated_end; /* ring of the state chunks that were updated last */
  gmi_chunk_t *updated[GMI_UPDATED];
} gmi_host_t;

/* ---- tensors */
/* A tensor's word holds its user counts, flags about its bytes, and the state it has while it has no users. It is one
 * word so that one compare-and-swap checks DEAD and FROZEN and adds a user. The user fields count acquires that have
 * not been released: one field for each mode counts acquires of the whole tensor on the device; the field OTHERS counts
 * all other acquires, each of which also has a lease (core/lease.h). A release moves a claimed use to OTHERS.
 * The counts, and the state that a release sets, change without the manager's lock; the flags change only under it. */
#define GMI_TENSOR_STATE_SHIFT 61                      /* GEMINI_STATE_*, never COMPUTE, which means "has users" */
#define GMI_TENSOR_BATCH_GRADIENT (UINT64_C(1) << 60)  /* the slow acquire under way writes the gradient */
#define GMI_TENSOR_BATCH_PARAMETER (UINT64_C(1) << 59) /* it writes the parameter (both: in the registered tensor) */
#define GMI_TENSOR_GRADIENT (UINT64_C(1) << 58)        /* the bytes hold the gradient (kept in the registered tensor) */
#define GMI_TENSOR_FROZEN (UINT64_C(1) << 57) /* the chunk size is being changed: only the lock's holder acquires */
#define GMI_TENSOR_DEAD (UINT64_C(1) << 56)   /* the record is about to be freed: acquires fail */
#define GMI_TENSOR_USERS ((UINT64_C(1) << 56) - 1) /* all user fields */
typedef struct gmi_field {
  uint64_t unit, mask; /* a count of 1 in the field; the field's bits */
} gmi_field_t;
#define GMI_TENSOR_FIELD(shift, bits) { UINT64_C(1) << (shift), ((UINT64_C(1) << (bits)) - 1) << (shift) }
enum { GMI_TENSOR_OTHERS }; /* index of the field of acquires that have a lease, and of claimed releases */
static const gmi_field_t gmi_tensor_fields[] = { /* the others by mode, GEMINI_READ... */
                                                 [GMI_TENSOR_OTHERS] = GMI_TENSOR_FIELD(40, 16),
                                                 [GEMINI_READ] = GMI_TENSOR_FIELD(0, 16),
                                                 [GEMINI_WRITE] = GMI_TENSOR_FIELD(16, 12),
                                                 [GEMINI_READ_WRITE] = GMI_TENSOR_FIELD(28, 12)
};
static inline uint64_t gmi_tensor_field_users(uint64_t word, uint32_t field) {
  return (word & gmi_tensor_fields[field].mask) / gmi_tensor_fields[field].unit;
}
static inline uint64_t gmi_tensor_users(uint64_t word) {
  uint64_t users = 0;
  for (uint32_t field = GMI_TENSOR_OTHERS; field <= GEMINI_READ_WRITE; field++)
    users += gmi_tensor_field_users(word, field);
  return users;
}
/* Records are reused, but their memory is never freed while the manager is open, so that any thread may read word and
 * life of any record. life is stored last (release) when a tensor is created, and cleared when it is dropped: a thread
 * that loads its handle's generation from life (acquire) sees the other fields. The thread checks life again after it
 * has added itself to the word, as the record may have got another tensor in between. */
typedef struct gmi_tensor {
  _Atomic uint64_t word; /* Atomic: GMI_TENSOR_* flags, state, users */
  _Atomic uint32_t life; /* Atomic: the generation, from 1, while the tensor exists; else 0 */
  uint32_t arena;        /* Constant while the tensor exists */
  uint64_t offset, size; /* bytes in the arena; Constant while the tensor exists */
  _Atomic uint64_t seen; /* Atomic: op serial << 2 | modes that this op has recorded. Relaxed: a stale value only makes
                          * the tracer record the same touch again. */
  uint32_t base;         /* the registered tensor this is a counterpart of; itself when registered */
  uint32_t next;         /* next counterpart of the same base; GMI_NONE ends */
  char *name;            /* of registered tensors; owned */
  uint32_t hash_next;
  uint32_t generation; /* of the record's latest tensor */
} gmi_tensor_t;

/* ---- arenas */
enum { GMI_ARENA_NAME = 72 }; /* bytes, with the NUL: 63 of a caller's name, and room for " slices" */
typedef struct gmi_arena {
  char name[GMI_ARENA_NAME];
  uint32_t index, kind, element_bytes;
  uint32_t like;      /* index of the arena whose layout this one follows; its own when it follows none */
  uint32_t store;     /* index of the arena that owns the chunks: its own, or that of the arena it reuses */
  uint32_t followers; /* number of arenas whose like or store is this one */
  bool reused;        /* some arena reuses this one's bytes */
  bool grows;         /* GEMINI_ARENA_GROWS */
  bool reserved[6];
  uint64_t generation;
  uint8_t *base;             /* device addresses */
  uint32_t home, home_count; /* home slot of the first chunk; number of chunks that have a home slot */
  uint64_t capacity;         /* bytes, a multiple of the largest chunk size */
  uint64_t capacity_asked;   /* bytes, as the caller asked for */
  _Atomic uint64_t size;     /* Atomic: bytes in use; written under the lock, stored (release) for gmi_range_bytes() */
  gmi_chunk_t *chunks;       /* address space for all chunks of capacity; only in the arena that owns the chunks */
  uint64_t chunk_map_bytes;
  _Atomic uint32_t chunk_count; /* Atomic: initialised records; stored (release) after them, loaded (acquire) first */
  uint32_t tensor_count, tensor_capacity; /* of order */
  uint32_t *order;                        /* tensors of this arena, sorted by offset while order_sorted is set */
  bool order_sorted;
  uint64_t longest; /* bytes of the longest tensor the arena has ever had */
  struct {
    uint32_t slices;  /* of a sharded arena: index of the arena that holds this rank's slices; else GMI_NONE */
    uint32_t whole;   /* of an arena of slices: index of the sharded arena; else GMI_NONE */
    uint32_t group;   /* of both: index of the group */
    uint32_t stage;   /* of a sharded arena: GEMINI_ZERO_*; AUTO: what is gathered leaves as with PARAMS */
    uint32_t dtype;   /* of a sharded arena of gradients: GEMINI_DTYPE_* */
    uint32_t reduced; /* of a sharded arena of gradients: chunks, from the last one down, that have been added since the
                        * last update, or with sums in this round */
    /* Of a sharded arena of gradients whose sums have bytes of their own (gmi_arena_has_sums()): */
    bool due;       /* the next update or norm adds a round, on all ranks */
    bool summed;    /* the slices hold sums of earlier rounds, to which the next one is added */
    uint64_t since; /* value of bracket.op_serial_next before the first operator that may have written gradients since
                      * the last round */
    bool taken;     /* a plain range has been taken (gemini_arena_take()) */
    /* Of the arena whose elements say how all that follow it are divided: */
    uint32_t updated; /* chunks, from the last one down, that updates of parts have taken; the one that takes chunk 0
                       * sets it back to 0 */
  } shard;
} gmi_arena_t;

/* ---- sizes: of a chunk, and of its place in each tier */
typedef struct gmi_sizes {
  uint64_t chunk_bytes; /* its span of the arena's addresses, which alone says which chunk an address lies in */
  uint64_t frame_bytes; /* device: what is created, mapped and handed on; pages of the non-model heap are frames */
  uint64_t slot_bytes;  /* host: from one slot to the next */
  uint64_t block_bytes; /* file: from one block to the next */
} gmi_sizes_t;
/* How much larger slots and blocks are than they have to be: 0 except in tests, which make all sizes differ so that
 * code that confuses them fails. */
typedef struct gmi_sizes_padding {
  uint32_t slot_shift;  /* slots are frames << slot_shift */
  uint32_t block_bytes; /* added to each block */
} gmi_sizes_padding_t;

/* Of a chunk's place in a tier, GEMINI_TIER_*. */
static inline uint64_t gmi_sizes_tier_bytes(const gmi_sizes_t *s, uint32_t tier) {
  return tier == GEMINI_TIER_DEVICE ? s->frame_bytes : tier == GEMINI_TIER_HOST ? s->slot_bytes : s->block_bytes;
}
/* What a copy of a chunk between two tiers moves: all that the smaller of its two places holds. */
static inline uint64_t gmi_sizes_copy_bytes(const gmi_sizes_t *s, uint32_t from, uint32_t to) {
  uint64_t a = gmi_sizes_tier_bytes(s, from), b = gmi_sizes_tier_bytes(s, to);
  return a < b ? a : b;
}

/* ---- frames */
typedef struct gmi_frame {
  uint64_t handle;
  uint32_t next, previous; /* in the list of free frames, or of due ones; GMI_NONE ends the list */
  bool free;
  bool due;           /* its chunk is due to leave; see gmi_chunk_leaves_late() */
  uint64_t given;     /* the number of the frame among those that were given back, from 1 */
  gmi_fence_t ready;  /* work behind this fence may overwrite the frame */
  gmi_chunk_t *chunk; /* owner; NULL: the frame is free or belongs to the heap */
  void *own;          /* an address that maps it until it is destroyed (chunk/registered.c); NULL: it has none */
} gmi_frame_t;
typedef struct gmi_frame_list {
  uint32_t first, last, count; /* first and last only if there are any */
} gmi_frame_list_t;
typedef struct gmi_page { /* of the non-model heap */
  uint32_t frame_1;       /* index of its frame + 1; 0 = none */
  gmi_mapping_t mapping;
  bool settled; /* the fence ready of its frame has been reached */
  bool reserved[2];
} gmi_page_t;

#define GMI_STREAM_ENDING (UINT64_C(1) << 63) /* in life: the stream is being destroyed, and its handle is refused */
typedef struct gmi_stream {                   /* a cache line each, as the threads of other streams change theirs */
  _Alignas(64) _Atomic uint64_t life;         /* Atomic: the generation, from 1, while the stream is open, with
                                       * GMI_STREAM_ENDING while it is being destroyed; else 0. Stored under the lock */
  uint64_t generation;                        /* of the latest stream with this index */
  bool internal;
  bool named;  /* the caller knows native: it was adopted, or told to the caller */
  bool hooked; /* adopted by a hook: may be ended when another stream needs the index */
  bool reserved;
  _Atomic uint32_t users;    /* Atomic: calls that queue work on the stream, or wait for it, without the manager's lock;
                           * see gmi_stream_enter() */
  _Atomic uint64_t recorded; /* Atomic: number of the last mark claimed; stored under the lock before the mark is placed
                              * and loaded without it by gmi_fence_later(); both seq_cst, see fence_now() */
  void *native;
  uint64_t used; /* hooked: value of hook.clock at the last use */
} gmi_stream_t;

/* Running mean of the time of one chunk's copy over a link, nanoseconds. */
typedef struct gmi_rate {
  double mean;
  uint64_t samples;
} gmi_rate_t;

/* One direction between two tiers. Atomic fields are written under the lock and read without it by statistics, which
 * order no other memory. */
typedef struct gmi_link {
  uint32_t from_tier, to_tier;       /* GEMINI_TIER_*; Constant, as the next three */
  uint32_t from_ordinal, to_ordinal; /* of devices */
  uint32_t stream;                   /* stream of the copies; GMI_NONE: file transfers, which use no stream */
  uint32_t reserved;
  gmi_rate_t chunk_ns;
  _Atomic uint64_t bw_bytes_per_s;                    /* Atomic: from chunk_ns, or as configured; 0 = unknown */
  _Atomic uint64_t moved_bytes[GEMINI_REASON_COUNT];  /* Atomic */
  _Atomic uint64_t moved_chunks[GEMINI_REASON_COUNT]; /* Atomic */
} gmi_link_t;

/* Queued work whose time is read once its end has been reached: a copy, an update on the device, or a collective. */
typedef struct gmi_timed {
  gmi_fence_t begin, end;
  uint64_t elements;  /* of a copy: 1, a chunk; of an update: of each array; of a collective: chunks */
  gmi_link_t *link;   /* of a copy; else NULL */
  uint64_t *shortest; /* of a collective: the shortest time so far, nanoseconds; 0: none. Else NULL */
} gmi_timed_t;
enum { GMI_LINKS = 4 };

typedef struct gmi_heap gmi_heap_t;
struct gmi_tracer;
struct gmi_timeline;
struct gmi_chunk_use;
struct gmi_workers;
struct gmi_store;
struct gmi_borrowed;
struct gmi_sys;
struct gmi_reserve;
struct gmi_deferred;
struct gmi_update_user;
struct gmi_graph;
struct gmi_group;

enum { GMI_HIT_STRIPES = 16, GMI_HIT_OWNED = 8, GMI_LOG_QUEUE = 8, GMI_CHANGED = 64 };
/* One of several counters of hits, so that threads seldom write the same cache line. 128 bytes, as processors prefetch
 * lines in pairs. The first GMI_HIT_OWNED threads of the process have one each, which nobody else writes; the others
 * share the rest. Relaxed: the sum is a statistic. It only grows: a reset stores it in stats.hits_before. */
typedef struct gmi_stripe {
  _Alignas(128) _Atomic uint64_t hits;
} gmi_stripe_t;

/* Fields are grouped by the file that changes them; the comment at a group names it. */
typedef struct gmi_manager {
  struct {                             /* core/handles.c; Constant while the manager is open */
    uint64_t id;                       /* the value of the manager's handle */
    uint32_t entry, generation_before; /* generation_before: objects' generations start above it */
  } identity;
  pthread_mutex_t lock;
  gemini_config_t config; /* Constant, except the budgets */
  struct {                /* Constant, except the last */
    const gmi_device_ops_t *ops;
    void *self;
    uint64_t granularity;
    struct gmi_leftover *leftovers; /* core/streams.c: freed after the device has been closed */
  } device;
  struct { /* Constant: the tracer's tables, and its own records */
    const gmi_observer_t *observer;
    const gmi_advice_t *advice;
    struct gmi_tracer *tracer;
    struct gmi_timeline *timeline;
    bool plans_only;    /* made for one forecast: api/manager.h */
    const char *holder; /* core/lock.c: of the lock, while a timeline is recorded; NULL: unknown */
    uint64_t held_ns;   /* since then */
  } trace;

  struct {                               /* chunk/arena.c */
    gmi_arena_t *_Atomic at[GMI_ARENAS]; /* Atomic: stored (release) when the record is filled, loaded (acquire) */
    uint64_t generations[GMI_ARENAS];    /* of the latest arena with each index */
    uint32_t found;                      /* index of the arena that the last address lay in; may be gone */
    bool explained;                      /* chunk/faults.c: the handler of SIGSEGV knows them */
  } arenas;
  struct {            /* chunk/arena.c */
    gmi_tensor_t *at; /* address space for GMI_TENSORS; Constant */
    uint32_t high, free;
    uint32_t *buckets, bucket_count; /* hash table of names */
    uint64_t alive;
  } tensors;

  gmi_stream_t streams[GMI_DEVICE_MAX_STREAMS];
  gmi_link_t links[GMI_LINKS]; /* core/links.c; gmi_link() finds one */

  struct {                        /* chunk/cut.c: the sizes (gmi_sizes_t), which gmi_cut() chooses at first need */
    _Atomic uint64_t chunk_bytes; /* Atomic: 0 = not chosen yet; stored (release) after the tables below depend on it,
                                   * loaded (acquire) by the fast path before it uses chunk_shift and chunk records */
    uint32_t chunk_shift;         /* log2 of it */
    uint32_t frame_shift;         /* log2 of frame_bytes, which is a power of two */
    uint64_t chunk_count;         /* initialised chunk records in all arenas */
    _Atomic uint64_t frame_bytes; /* Atomic: read by statistics without the lock */
    uint64_t slot_bytes, block_bytes;
    gmi_sizes_padding_t padding; /* Constant */
  } cut;

  struct { /* chunk/residency.c */
    gmi_frame_t *at;
    uint32_t count;                 /* frames that the budget allows */
    uint32_t capacity;              /* entries of at[] */
    uint32_t made;                  /* frames that exist on the device */
    _Atomic uint32_t used;          /* Atomic: frames of chunks and heap pages; read by statistics */
    gmi_frame_list_t free;          /* unused frames, the one freed longest ago first */
    gmi_frame_list_t due;           /* frames of chunks that are due to leave, for longest first */
    bool leaving;                   /* one of these is about to */
    uint64_t given;                 /* frames given back so far */
    uint32_t *unmade, unmade_count; /* indices in at[] without a device frame */
    uint32_t resident;              /* chunks with frames */
    _Atomic uint64_t clock; /* Atomic: fetches so far, the clock of gmi_chunk_touched(); relaxed: only ranks victims */
  } frames;

  struct { /* chunk/nonmodel.c */
    gmi_heap_t *heap;
    uint8_t *base;
    uint64_t range, page_map_bytes;
    gmi_page_t *pages;
    uint64_t page_high;     /* index behind the last page that was ever used */
    uint32_t frames;        /* frames of the heap, including those without live blocks */
    uint64_t peak_op;       /* peak of live bytes since the op began */
    _Atomic uint64_t peak;  /* Atomic */
    uint32_t pages_peak_op; /* peak of pages in use and groups.gradient_frames, together, since the op began */
  } nonmodel;

  struct {                                      /* chunk/hook.c */
    void (*when_locked)(struct gmi_manager *m); /* Constant: called under the manager's lock when waiting is not 0 */
    pthread_mutex_t lock;        /* guards the next three fields; taken after the manager's lock, held for moments */
    struct gmi_hook_free *frees; /* frees that would have had to wait for the manager's lock or for the device */
    uint32_t capacity;
    _Atomic uint32_t waiting; /* Atomic: entries of frees; written under hook.lock. Relaxed: a missed free is carried
                               * out by a later holder of the manager's lock */
    uint32_t stream;          /* index of the stream that the last call named */
    uint64_t clock;           /* number of calls that changed the stream */
    bool warned;              /* a failure has been logged */
  } hook;

  struct { /* chunk/graph.c */
    struct gmi_graph *at[GMI_GRAPHS];
    uint64_t generations[GMI_GRAPHS]; /* of the latest graph with each index */
    uint32_t count, frames;           /* frames: the part of frames.used that graphs own */
    _Atomic uint64_t streams;         /* Atomic: bit per stream on which a graph is begun; written under the lock */
    struct gmi_graph *op_of;          /* the graph in whose capture an operator is open, or NULL */
  } graphs;

  struct { /* chunk/group.c, chunk/shard.c, chunk/sums.c */
    struct gmi_group *at[GMI_GROUPS];
    uint64_t generations[GMI_GROUPS];                /* of the latest group with each index */
    uint32_t frames, gradient_frames;                /* of chunks of sharded arenas; those of gradients among them */
    uint32_t peak_op;                                /* peak of frames and pages in use, together, since the op began */
    _Atomic uint64_t gather_streams, reduce_streams; /* Atomic: bit per stream; written under the lock */
    /* Atomic: who this process is in a group, for dumps without the lock: its rank, how many ranks there are, and how
     * many in a replica, from the lowest 16 bits up; 0: there is no such group. Written under the lock */
    _Atomic uint64_t who[GMI_GROUPS];
    uint32_t batches;       /* open gmi_gather_batch_begin() */
    uint64_t batch_streams; /* bit per stream: gathers of the open batches are on it, or held back */
    uint64_t held_streams;  /* bit per stream: gathers wait to be queued on it */
    /* Constant: queues what waits for a stream of held_streams, of which the bit is then 0, also after a failure */
    gemini_status_t (*queue_held)(struct gmi_manager *m, uint32_t stream);
    /* Constant: the failure of a group, for waits for its streams; GEMINI_OK: no group has failed */
    gemini_status_t (*failure)(struct gmi_manager *m);
  } groups;

  gmi_host_t host; /* chunk/host.c */
  struct {         /* chunk/files.c, chunk/checkpoint.c */
    char *dir,
        *checkpoint_name; /* Constant; dir NULL: no file tier; checkpoint_name NULL: files end with the process */
    struct gmi_store *store;
    struct gmi_borrowed *borrowed; /* files of the caller's that chunks are read from; NULL: none has been borrowed */
    const struct gmi_sys *sys;     /* system calls that tests replace; NULL: the system's own */
    _Atomic uint64_t used;         /* Atomic: bytes of blocks, for statistics */
    uint64_t opened_bytes;         /* size of the store's blocks; before the cut they may be others than it will want */
    bool checkpointing;            /* a chunk keeps its block even while a tier above has a valid copy */
    bool checkpoint_is_ours;       /* this process made the last checkpoint in the files, or resumed from it */
  } file;
  struct {                      /* chunk/files.c: transfers */
    uint32_t count, writes;     /* transfers whose result is not processed yet; the writes among them */
    gmi_io_t *_Atomic finished; /* Atomic: stack; engine threads push with a compare-and-swap, the lock's holder takes
                                 * the whole list by an exchange, so that no ABA can occur */
    gemini_status_t failure;    /* of a write, reported to one caller */
    int native_code;
    char message[384];
    uint64_t last_ns; /* end of the last transfer */
  } io;
  struct { /* chunk/update.c, chunk/deferred.c */
    struct gmi_workers *workers;
    struct gmi_deferred *deferred;           /* pieces of accepted updates that are not queued yet */
    uint32_t stream;                         /* the library's own stream for updates on the device */
    _Atomic gmi_fence_t end;                 /* Atomic: behind the last span queued on that stream */
    struct gmi_update_user *users;           /* copies of the caller's data that updates may still use */
    struct gmi_spec *first_spec, *last_spec; /* chunk/speculate.c: units that are speculated, in that order */
  } update;

  struct {
    gmi_rate_t device_update; /* nanoseconds per element of updates on the device */
    gmi_timed_t timed[128];   /* read once end has been reached */
    uint32_t timed_count;
  } rate;

  /* The update callback of a device span runs without the lock, in the middle of a call that holds the span's chunks.
   * Until it returns, other threads' calls that use chunks wait in gmi_lock(). */
  struct {
    pthread_cond_t ended;   /* used with the manager's lock */
    pthread_t thread;       /* the thread that runs the callback */
    _Atomic uint32_t depth; /* Atomic: nesting depth on that thread; 0 = none runs. Written under the lock, read without
                             * it by statistics */
  } callback;

  struct { /* written under the lock; acquires and releases read them relaxed, as they order no other memory */
    _Atomic uint64_t op_serial; /* Atomic: 0 = no op open */
    uint64_t op_serial_next;
    _Atomic uint32_t phase; /* Atomic */
    bool iteration_open;
  } bracket;
  bool closing;

  gmi_stripe_t stripes[GMI_HIT_STRIPES]; /* Atomic */
  gmi_stats_t stats;                     /* Atomic */
  gmi_watch_t watch;
  gmi_failure_t failure; /* of asynchronous work, the first; gemini_manager_close() reports it */
  gmi_leases_t leases;

  struct {                               /* GEMINI_CHECK */
    gmi_chunk_t *changed[GMI_CHANGED];   /* records that changed since the lock was taken; checked at unlock */
    uint32_t changed_count;              /* more than GMI_CHANGED: any record may have changed */
    uint32_t blocks_held;                /* blocks of the store that chunk records name */
    _Atomic uintptr_t lock_owner;        /* Atomic: identifies the lock's holder, 0 = none; a thread compares it only
                                          * with its own value, which no other thread stores */
    void (*call)(struct gmi_manager *m); /* called before each unlock */
  } check;

  struct {
    struct {
      int32_t level;
      char text[240];
    } queue[GMI_LOG_QUEUE];
    uint32_t count;
  } log;
} gmi_manager_t;

/* Sizes, valid once gmi_cut() has chosen them; the lock is held. */
static inline uint64_t gmi_chunk_bytes(const gmi_manager_t *m) { return UINT64_C(1) << m->cut.chunk_shift; }
static inline uint64_t gmi_frame_bytes(const gmi_manager_t *m) {
  return atomic_load_explicit(&m->cut.frame_bytes, memory_order_relaxed);
}
static inline uint64_t gmi_slot_bytes(const gmi_manager_t *m) { return m->cut.slot_bytes; }
static inline uint64_t gmi_block_bytes(const gmi_manager_t *m) { return m->cut.block_bytes; }
static inline gmi_sizes_t gmi_sizes(const gmi_manager_t *m) {
  return (gmi_sizes_t){ gmi_chunk_bytes(m), gmi_frame_bytes(m), m->cut.slot_bytes, m->cut.block_bytes };
}
static inline uint64_t gmi_tier_unit_bytes(const gmi_manager_t *m, uint32_t tier) {
  gmi_sizes_t sizes = gmi_sizes(m);
  return gmi_sizes_tier_bytes(&sizes, tier);
}
static inline uint64_t gmi_copy_bytes(const gmi_manager_t *m, uint32_t from, uint32_t to) {
  gmi_sizes_t sizes = gmi_sizes(m);
  return gmi_sizes_copy_bytes(&sizes, from, to);
}

/* core/links.c */
void gmi_links_open(gmi_manager_t *m); /* fills in all fields but stream */
/* The link between two tiers. The link must exist. */
gmi_link_t *gmi_link(gmi_manager_t *m, uint32_t from_tier, uint32_t to_tier);
/* The two directions between host and device, whose copies run on streams. */
static inline gmi_link_t *gmi_link_in(gmi_manager_t *m) { return gmi_link(m, GEMINI_TIER_HOST, GEMINI_TIER_DEVICE); }
static inline gmi_link_t *gmi_link_out(gmi_manager_t *m) { return gmi_link(m, GEMINI_TIER_DEVICE, GEMINI_TIER_HOST); }
/* The link of file reads or file writes. */
static inline gmi_link_t *gmi_link_file(gmi_manager_t *m, bool write) {
  return write ? gmi_link(m, GEMINI_TIER_HOST, GEMINI_TIER_FILE) : gmi_link(m, GEMINI_TIER_FILE, GEMINI_TIER_HOST);
}
/* The bytes in use of a tier have changed: reports that if a timeline is being written. */
static inline void gmi_counters_change(gmi_manager_t *m) {
  if (m->trace.timeline) m->trace.observer->counters_change(m);
}
static inline bool gmi_link_is_fetch(const gmi_link_t *link) { return link->to_tier == GEMINI_TIER_DEVICE; }
/* Is so much queued on a link between host and device that more would not start soon? What can wait then waits with its
 * caller: a driver's queue is bounded, and a thread that finds it full stands still, with all that it has yet to queue
 * elsewhere. */
bool gmi_link_is_full(gmi_manager_t *m, const gmi_link_t *link);
/* Is enough queued on it for the time until somebody looks again? */
bool gmi_link_is_busy(gmi_manager_t *m, const gmi_link_t *link);
void gmi_link_moved(gmi_manager_t *m, gmi_link_t *link, uint32_t reason, uint64_t chunks); /* chunks were moved */
void gmi_link_measured(gmi_manager_t *m, gmi_link_t *link);             /* chunk_ns has changed: publishes the rate */
uint64_t gmi_link_rate(const gmi_manager_t *m, const gmi_link_t *link); /* measured bytes per second; 0 = unknown */

/* core/handles.c */
extern uint64_t gmi_manager_serial; /* managers opened so far; tests may add to it while no manager is being opened */
/* Makes the manager's handle valid. False: as many managers are open as there can be (*full_out), or the handles of
 * all free places are used up. */
bool gmi_manager_enter(gmi_manager_t *m, bool *full_out);
void gmi_manager_leave(gmi_manager_t *m); /* makes its handle and its objects' handles invalid */
/* A place for an open manager. gmi_manager_enter() stores id (release) after manager; gmi_manager_get() loads id
 * (acquire) and then reads manager. id is 0 while the place is free, so a handle of a closed manager never matches. The
 * caller must not close a manager while another call on it runs. */
typedef struct gmi_place {
  _Alignas(32) _Atomic uint64_t id; /* a power of two: its size multiplies an index in each call */
  gmi_manager_t *manager;
  pid_t opener; /* the process that opened it */
} gmi_place_t;
extern gmi_place_t gmi_places[GMI_MANAGERS];                            /* by the entry in a handle */
gmi_manager_t *gmi_manager_wrong(uint64_t id);                          /* records the error and returns NULL */
static inline gmi_manager_t *gmi_manager_get(gemini_manager_t handle) { /* NULL, with the error recorded */
  uint64_t id = gmi_id(handle);
  gmi_place_t *place = &gmi_places[id >> 54 & (GMI_MANAGERS - 1)];
  return id && atomic_load_explicit(&place->id, memory_order_acquire) == id ? place->manager : gmi_manager_wrong(id);
}
void *gmi_handle(const gmi_manager_t *m, uint32_t type, uint64_t generation, uint32_t index);
void gmi_handle_wrong(uint64_t id, uint32_t type); /* records the error */
static inline uint32_t gmi_handle_index_bits(uint32_t type) {
  return type == GMI_HANDLE_TENSOR   ? GMI_TENSOR_INDEX_BITS
         : type == GMI_HANDLE_ARENA  ? GMI_ARENA_INDEX_BITS
         : type == GMI_HANDLE_STREAM ? GMI_STREAM_INDEX_BITS
         : type == GMI_HANDLE_GRAPH  ? GMI_GRAPH_INDEX_BITS
         : type == GMI_HANDLE_GROUP  ? GMI_GROUP_INDEX_BITS
                                     : 0;
}
/* Is it a handle of this type and of this manager? Compares all bits above the object's at once: the type in the
 * manager's own handle is GMI_HANDLE_MANAGER. */
static inline bool gmi_handle_is(const gmi_manager_t *m, uint64_t id, uint32_t type) {
  return (id ^ m->identity.id) >> GMI_HANDLE_OBJECT_BITS == (uint64_t)(type ^ GMI_HANDLE_MANAGER)
                                                                << (60 - GMI_HANDLE_OBJECT_BITS);
}
/* Returns true, with index and generation, if handle has this type and belongs to this manager; otherwise records the
 * error. Inline because each acquire and release calls it several times with a constant type. */
static inline bool gmi_handle_open(const gmi_manager_t *m, const void *handle, uint32_t type, uint32_t *index_out,
                                   uint64_t *generation_out) {
  uint64_t id = gmi_id(handle);
  if (!gmi_handle_is(m, id, type)) {
    gmi_handle_wrong(id, type);
    return false;
  }
  uint64_t object = id & ((UINT64_C(1) << GMI_HANDLE_OBJECT_BITS) - 1);
  uint32_t bits = gmi_handle_index_bits(type);
  *index_out = (uint32_t)(object & ((1u << bits) - 1));
  *generation_out = object >> bits;
  return true;
}

/* core/lock.c */
/* Takes the lock and waits until no other thread's update callback runs. function: name of the public function, for
 * reports of waits; static storage. */
void gmi_lock(gmi_manager_t *m, const char *function);
/* Takes the lock even while another thread's update callback runs. For calls that use no chunk's bytes or record. */
void gmi_lock_beside(gmi_manager_t *m, const char *function);
/* Waits until no other thread's update callback runs. Lock held; released while waiting. */
void gmi_callbacks_wait(gmi_manager_t *m, const char *function);
void gmi_callback_begin(gmi_manager_t *m); /* releases the lock for a callback; logs stay queued */
void gmi_callback_end(gmi_manager_t *m, const char *function);
void gmi_unlock(gmi_manager_t *m);                               /* then sends the queued logs */
bool gmi_lock_try(gmi_manager_t *m);                             /* false: another thread holds it; never blocks */
void gmi_unlock_quietly(gmi_manager_t *m);                       /* logs stay queued */
void gmi_lock_wait(gmi_manager_t *m, pthread_cond_t *condition); /* lock held; released while waiting */
bool gmi_lock_is_mine(gmi_manager_t *m);                         /* for assertions; without GEMINI_CHECK always true */
/* The body of a public function with the manager handle mgr: evaluates call, which may use m, under m's lock. */
#define API_LOCKED(call)                   \
  gmi_manager_t *m = gmi_manager_get(mgr); \
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);   \
  gmi_lock(m, __func__);                   \
  gemini_status_t status = (call);         \
  gmi_unlock(m);                           \
  API_RETURN(status)
void gmi_log(gmi_manager_t *m, int32_t level, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif

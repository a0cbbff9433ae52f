/* The manager and what it is made of: the records that every module shares.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Lock: gmi_manager.lock guards everything that is not marked Atomic or Constant. Fast paths (acquire and release of
 * resident tensors) do not take it: they work on the atomic words of tensors and chunks, which only the lock's holder
 * may change except for their counts; for parts of tensors they take the lock of a table of leases. User callbacks run
 * without the lock; logs are queued and sent after it. */
#ifndef GMI_MANAGER_H
#define GMI_MANAGER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/handle.h"
#include "base/status.h"
#include "core/lease.h"
#include "core/observer.h"
#include "core/stats.h"
#include "core/watch.h"
#include "device/device.h"
#include "gemini.h"

/* ---- handles: [63:60] type, [59:42] which manager (its entry in the table of managers and the end of its
 * serial number), [41:0] which object.
 * An object is told by its index, in as many bits as its type needs, and above it by a generation, which counts the
 * objects that have had this index. Generations never start anew, not even in a later manager whose handles begin
 * alike: an index whose generations are used up is not given again. */
enum {
  GMI_HANDLE_MANAGER = 1,
  GMI_HANDLE_ARENA = 2,
  GMI_HANDLE_TENSOR = 3,
  GMI_HANDLE_STREAM = 4,
  GMI_HANDLE_GRAPH = 5
};
#define GMI_MANAGERS 64u
#define GMI_ARENAS 1024u
#define GMI_TENSORS (1u << 24)
#define GMI_GRAPHS 256u
#define GMI_NONE UINT32_MAX
#define GMI_HANDLE_OBJECT_BITS 42
#define GMI_HANDLE_MANAGER_MASK UINT64_C(0x0ffffc0000000000)
enum { GMI_ARENA_INDEX_BITS = 10, GMI_TENSOR_INDEX_BITS = 24, GMI_STREAM_INDEX_BITS = 6, GMI_GRAPH_INDEX_BITS = 8 };
#define GMI_TENSOR_GENERATIONS ((1u << (GMI_HANDLE_OBJECT_BITS - GMI_TENSOR_INDEX_BITS)) - 1) /* 1 to this */
static inline uint64_t gmi_object_id(const gemini_access_t *access) { return gmi_id(access->object.tensor); }

/* ---- fences and streams */
/* Index of GEMINI_STREAM_CALLER where a stream index is wanted. */
#define GMI_CALLER GMI_NONE

/* Uses of a chunk by streams: fences behind the latest of two streams; a third one waits for one of them first, so
 * that its fence stands for both. Atomic. */
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
  gmi_fence_t left; /* after which queued work does not use the address any more; set when it loses the frame */
} gmi_mapping_t;

/* ---- host slots: places for chunks in host memory. What uses a slot's bytes is noted here, whosever they are. */
typedef struct gmi_slot {
  gmi_chunk_t *chunk;         /* or NULL */
  gmi_fence_t fence;          /* queued copies that read or write it */
  _Atomic uint64_t work_done; /* Atomic: updates and transfers finished; work_queued when none is pending */
  uint64_t work_queued;
  _Atomic gemini_status_t failure; /* Atomic: of the last read into it */
  bool block;                      /* holds blocks, no chunk */
} gmi_slot_t;

enum { GMI_UPDATED = 1024 };
typedef struct gmi_host {
  struct gmi_reserve *reserve;
  uint8_t *base;
  _Atomic uint64_t used; /* Atomic: bytes of slots */
  uint64_t grain_bytes, part_bytes, part_count;
  uint64_t *committed; /* [part_count] bytes at the part's start that exist and are locked */
  gmi_slot_t *slots;   /* address space for all there can be */
  uint64_t *free_map;  /* bit per slot */
  uint64_t slot_map_bytes, free_map_bytes;
  uint64_t home_end;                     /* slot behind the last home */
  uint32_t slot_count, free_count, hand; /* within the budget */
  uint32_t slot_most;                    /* chunks may still lie in as many, behind a smaller budget */
  struct gmi_host_heap *heap;            /* NULL until the first one */
  uint32_t block_slots, reserved2;       /* slots that blocks may lie in */
  uint64_t updated_first, updated_end;   /* the chunks of states updated last, in a ring */
  gmi_chunk_t *updated[GMI_UPDATED];
} gmi_host_t;

/* ---- tensors */
/* A tensor's word: who uses it, what its bytes are, and its state when nobody uses it. The users' fields count acquires
 * not yet released: of the whole tensor on the device, by mode; of all others, which have a lease (core/lease.h). */
#define GMI_TENSOR_STATE_SHIFT 61                      /* GEMINI_STATE_*; COMPUTE is not among them */
#define GMI_TENSOR_BATCH_GRADIENT (UINT64_C(1) << 60)  /* the acquire under way, under the lock, writes its gradient */
#define GMI_TENSOR_BATCH_PARAMETER (UINT64_C(1) << 59) /* likewise itself (both kept in the registered tensor) */
#define GMI_TENSOR_GRADIENT (UINT64_C(1) << 58)    /* a gradient has taken the bytes (kept in the registered tensor) */
#define GMI_TENSOR_FROZEN (UINT64_C(1) << 57)      /* the holder of the lock cuts arenas anew: only it may acquire */
#define GMI_TENSOR_DEAD (UINT64_C(1) << 56)        /* its record is about to go: nobody may acquire it any more */
#define GMI_TENSOR_USERS ((UINT64_C(1) << 56) - 1) /* all users' fields */
#define GMI_TENSOR_OTHERS_SHIFT 40                 /* 16 bits: acquires that have a lease */
#define GMI_TENSOR_OTHERS_MASK (UINT64_C(0xffff) << 40)
static inline unsigned gmi_tensor_mode_shift(uint32_t mode) { /* of the whole tensor's acquires with a GEMINI_READ... */
  return mode == GEMINI_READ ? 0 : mode == GEMINI_WRITE ? 16 : 28;
}
static inline uint64_t gmi_tensor_mode_mask(uint32_t mode) { /* 16, 12 and 12 bits */
  return mode == GEMINI_READ ? UINT64_C(0xffff) : UINT64_C(0xfff) << gmi_tensor_mode_shift(mode);
}
static inline uint64_t gmi_tensor_users(uint64_t word) {
  return (word & 0xffff) + (word >> 16 & 0xfff) + (word >> 28 & 0xfff) + (word >> 40 & 0xffff);
}
typedef struct gmi_tensor {
  _Atomic uint64_t word; /* Atomic: GMI_TENSOR_* flags, state, users */
  _Atomic uint32_t life; /* Atomic: its generation, from 1, while it lives; set last and cleared first */
  uint32_t arena;        /* Constant while it lives */
  uint64_t offset, size; /* bytes in the arena; Constant while it lives */
  _Atomic uint64_t seen; /* Atomic: op serial << 2 | modes: recorded in this op already */
  uint32_t base;         /* the registered tensor this is a counterpart of; itself when registered */
  uint32_t next;         /* next counterpart of the same base; GMI_NONE ends */
  char *name;            /* of registered tensors; owned */
  uint32_t hash_next;
  uint32_t generation; /* the last one given */
} gmi_tensor_t;

/* ---- arenas */
enum { GMI_ARENA_NAME = 64 }; /* bytes, with the NUL */
typedef struct gmi_arena {
  char name[GMI_ARENA_NAME];
  uint32_t index, kind, element_bytes;
  uint32_t like;      /* arena whose layout it follows; itself when none */
  uint32_t store;     /* arena that owns the chunks: itself, or the one it reuses */
  uint32_t followers; /* arenas whose like or store this is */
  bool reused;        /* some arena reuses this one */
  bool reserved[7];
  uint64_t generation;
  uint8_t *base;             /* device addresses */
  uint32_t home, home_count; /* slot of its first chunk when all fit; how many have a place there */
  uint64_t capacity;         /* bytes, a multiple of the largest chunk */
  uint64_t capacity_asked;
  _Atomic uint64_t size; /* Atomic: used so far, bytes */
  gmi_chunk_t *chunks;   /* address space for all chunks of capacity; of the store only */
  uint64_t chunk_map_bytes;
  _Atomic uint32_t chunk_count;           /* Atomic: initialised so far */
  uint32_t tensor_count, tensor_capacity; /* of order */
  uint32_t *order;                        /* tensors of this arena, sorted by offset when sorted */
  bool order_sorted;
  uint64_t longest; /* size of the longest tensor it ever had, bytes */
} gmi_arena_t;

/* ---- sizes: of a chunk, and of its place in each tier */
typedef struct gmi_sizes {
  uint64_t chunk_bytes; /* its span of the arena's addresses, which alone says which chunk an address lies in */
  uint64_t frame_bytes; /* device: what is created, mapped and handed on; pages of the non-model heap are frames */
  uint64_t slot_bytes;  /* host: from one slot to the next */
  uint64_t block_bytes; /* file: from one block to the next */
} gmi_sizes_t;
/* How much larger slots and blocks are than they have to be: 0 but in tests, which so tell the sizes apart. */
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
  uint32_t next, previous; /* in the list of free ones; GMI_NONE ends it */
  bool free;
  gmi_fence_t ready;  /* after which its bytes may be overwritten */
  gmi_chunk_t *chunk; /* owner, or NULL: free or the heap's */
} gmi_frame_t;
typedef struct gmi_page { /* of the non-model heap */
  uint32_t frame_1;       /* index of its frame + 1; 0 = none */
  gmi_mapping_t mapping;
  bool settled; /* its frame's ready has been reached */
  bool reserved[2];
} gmi_page_t;

typedef struct gmi_stream {
  _Atomic uint64_t life; /* Atomic: its generation, from 1, while it is open, else 0 */
  uint64_t generation;   /* the last one given */
  bool internal;
  bool named;  /* native is known to others: adopted, or told to the caller */
  bool hooked; /* adopted by a hook, and ended when others need its place */
  bool reserved[5];
  _Atomic uint64_t recorded; /* Atomic: last mark claimed; a claim comes before the mark is recorded */
  void *native;
  uint64_t used; /* hooked: when last named, on hook_clock */
} gmi_stream_t;

/* Running mean of what a chunk's copy takes over one link, nanoseconds. */
typedef struct gmi_rate {
  double mean;
  uint64_t samples;
} gmi_rate_t;

/* One direction between two tiers. What is marked Atomic is written under the lock and read without it. */
typedef struct gmi_link {
  uint32_t from_tier, to_tier;       /* GEMINI_TIER_*; Constant, as the next three */
  uint32_t from_ordinal, to_ordinal; /* of devices */
  uint32_t stream;                   /* that its copies are queued on; GMI_NONE: transfers of files, which have none */
  uint32_t reserved;
  gmi_rate_t chunk_ns;
  _Atomic uint64_t bw_bytes_per_s;                    /* Atomic: by chunk_ns, or as configured; 0: not known */
  _Atomic uint64_t moved_bytes[GEMINI_REASON_COUNT];  /* Atomic */
  _Atomic uint64_t moved_chunks[GEMINI_REASON_COUNT]; /* Atomic */
} gmi_link_t;
enum { GMI_LINKS = 4 };

typedef struct gmi_heap gmi_heap_t;
struct gmi_tracer;
struct gmi_timeline;
struct gmi_chunk_use;
struct gmi_workers;
struct gmi_store;
struct gmi_sys;
struct gmi_reserve;
struct gmi_deferred;

enum { GMI_HIT_STRIPES = 16, GMI_LOG_QUEUE = 8, GMI_CHANGED = 64 };
/* A cache line of its own, and its neighbour's, which processors fetch in pairs. */
typedef struct gmi_stripe {
  _Alignas(128) _Atomic uint64_t hits;
} gmi_stripe_t;

/* Fields are grouped by the file that changes them; the comment at a group names it. */
typedef struct gmi_manager {
  struct {                             /* core/handles.c; Constant once it is open */
    uint64_t id;                       /* the value of its handle */
    uint32_t entry, generation_before; /* generation_before: of all objects, those of earlier managers */
  } identity;
  pthread_mutex_t lock;
  gemini_config_t config; /* Constant, but the budgets */
  struct {                /* Constant */
    const gmi_device_ops_t *ops;
    void *self;
    uint64_t granularity;
  } device;
  struct { /* Constant: where reports go, and where advice comes from */
    const gmi_observer_t *observer;
    const gmi_advice_t *advice;
    struct gmi_tracer *tracer;
    struct gmi_timeline *timeline;
  } trace;

  struct {                               /* chunk/arena.c */
    gmi_arena_t *_Atomic at[GMI_ARENAS]; /* Atomic */
    uint64_t generations[GMI_ARENAS];    /* the last ones given */
  } arenas;
  struct {            /* chunk/arena.c */
    gmi_tensor_t *at; /* address space for GMI_TENSORS; Constant */
    uint32_t high, free;
    uint32_t *buckets, bucket_count; /* by name */
    uint64_t alive;
  } tensors;

  gmi_stream_t streams[GMI_DEVICE_MAX_STREAMS];
  gmi_link_t links[GMI_LINKS]; /* core/links.c; gmi_link() finds one */

  struct {                        /* chunk/cut.c; chosen by gmi_cut() at first need. Sizes: gmi_sizes_t */
    _Atomic uint64_t chunk_bytes; /* Atomic; 0 = not cut yet */
    uint32_t chunk_shift;         /* log2 of it */
    uint64_t chunk_count;         /* chunks initialised in all arenas */
    _Atomic uint64_t frame_bytes; /* Atomic */
    uint64_t slot_bytes, block_bytes;
    gmi_sizes_padding_t padding; /* Constant */
  } cut;

  struct { /* chunk/residency.c */
    gmi_frame_t *at;
    uint32_t count;                             /* that the budget allows */
    uint32_t capacity;                          /* of the array */
    uint32_t made;                              /* that exist on the device */
    _Atomic uint32_t used;                      /* Atomic: owned by chunks or heap pages */
    uint32_t free_first, free_last, free_count; /* that exist and are unused, given up longest ago first */
    uint32_t *unmade, unmade_count;             /* indices in at[] without a device frame */
    uint32_t resident;                          /* chunks with frames */
    _Atomic uint64_t clock;                     /* Atomic: fetches so far; tells which chunk was used longest ago */
    uint32_t clock_hand;                        /* for victims */
  } frames;

  struct { /* chunk/nonmodel.c */
    gmi_heap_t *heap;
    uint8_t *base;
    uint64_t range, page_map_bytes;
    gmi_page_t *pages;
    uint64_t page_high;     /* pages ever touched */
    uint32_t frames;        /* frames under the heap, idle ones included */
    uint64_t peak_op;       /* peak of live bytes since the op began */
    _Atomic uint64_t peak;  /* Atomic */
    uint32_t pages_peak_op; /* peak of pages in use since the op began */
  } nonmodel;

  struct {                                      /* chunk/hook.c */
    void (*when_locked)(struct gmi_manager *m); /* Constant: called with the manager's lock, when waiting is not 0 */
    pthread_mutex_t lock;        /* guards the next three; after the manager's lock, and held for moments only */
    struct gmi_hook_free *frees; /* came while the manager's lock was taken, or could not be carried out at once */
    uint32_t capacity;
    _Atomic uint32_t waiting; /* Atomic: of frees; written under this lock */
    uint32_t stream;          /* index named last */
    uint64_t clock, live;     /* calls that named another stream than the one before; allocations not yet freed */
    bool warned;              /* a failure has been logged */
  } hook;

  struct { /* chunk/graph.c */
    struct gmi_graph *at[GMI_GRAPHS];
    uint64_t generations[GMI_GRAPHS]; /* the last ones given */
    uint32_t count, frames;           /* frames: of frames.used, those of graphs */
    _Atomic uint64_t streams;         /* Atomic: bit per stream on which one is begun; written under lock */
    char op[128];                     /* operator that is open in a capture; "": none */
  } graphs;

  gmi_host_t host;               /* chunk/host.c */
  struct {                       /* chunk/files.c, chunk/checkpoint.c */
    char *dir, *checkpoint_name; /* Constant; NULL: no files; they vanish with the process */
    struct gmi_store *store;
    const struct gmi_sys *sys; /* NULL: the system's own calls */
    _Atomic uint64_t used;     /* Atomic: bytes of blocks */
    uint64_t opened_bytes;     /* size of the store's blocks; before the cut they may be others than it will want */
    bool checkpointing;        /* blocks stay, whatever else their chunks' bytes are in */
    bool checkpoint_is_ours;   /* the last checkpoint in the files is this process's, or was resumed by it */
  } file;
  struct {                      /* chunk/files.c: transfers */
    uint32_t count, writes;     /* not yet noted; of these, those that write */
    gmi_io_t *_Atomic finished; /* Atomic: list */
    gemini_status_t failure;    /* of a write, to be reported once */
    int native_code;
    char message[384];
    uint64_t last_ns; /* when the last one ended */
  } io;
  struct { /* chunk/update.c */
    struct gmi_workers *workers;
    struct gmi_deferred *deferred; /* what is left of updates */
    uint32_t stream;               /* internal */
    _Atomic gmi_fence_t end;       /* Atomic: of the last span queued there */
  } update;

  struct {
    gmi_rate_t device_update; /* nanoseconds an element of an update on the device */
    struct {
      gmi_fence_t begin, end;
      uint64_t elements;
      gmi_link_t *link; /* NULL: an update on the device */
    } timed[64];        /* to be measured */
    uint32_t timed_count;
  } rate;

  /* A device span's callback runs without the lock, in the middle of a call: until it has ended, the calls of other
   * threads that look at chunks wait (gmi_lock()). */
  struct {
    pthread_cond_t ended; /* with lock */
    pthread_t thread;
    _Atomic uint32_t depth; /* Atomic: nested, of that thread; 0: none runs */
  } callback;

  struct {
    _Atomic uint64_t op_serial; /* Atomic: 0 = no op open */
    uint64_t op_serial_next;
    _Atomic uint32_t phase; /* Atomic */
    bool iteration_open;
  } bracket;
  bool closing;

  gmi_stripe_t stripes[GMI_HIT_STRIPES]; /* Atomic */
  gmi_stats_t stats;                     /* Atomic */
  gmi_watch_t watch;
  struct { /* of asynchronous work; the first one stays */
    gemini_status_t status;
    char message[256];
  } failure;
  gmi_leases_t leases;
  struct gmi_leftover *leftovers;

  struct {                               /* GEMINI_CHECK */
    gmi_chunk_t *changed[GMI_CHANGED];   /* by chunk.c since the lock was taken, checked before it is let go */
    uint32_t changed_count;              /* more than GMI_CHANGED: all may have changed */
    uint32_t blocks_held;                /* blocks in files that chunks' records name */
    _Atomic uintptr_t lock_owner;        /* Atomic: identifies the thread that has the lock; 0: none */
    void (*call)(struct gmi_manager *m); /* called before the lock is let go */
  } check;

  struct {
    struct {
      int32_t level;
      char text[240];
    } queue[GMI_LOG_QUEUE];
    uint32_t count;
  } log;
} gmi_manager_t;

/* Once the arenas are cut; the lock is held. */
static inline uint64_t gmi_chunk_bytes(const gmi_manager_t *m) { return UINT64_C(1) << m->cut.chunk_shift; }
static inline uint64_t gmi_frame_bytes(const gmi_manager_t *m) {
  return atomic_load_explicit(&m->cut.frame_bytes, memory_order_relaxed);
}
static inline uint64_t gmi_slot_bytes(const gmi_manager_t *m) { return m->cut.slot_bytes; }
static inline uint64_t gmi_block_bytes(const gmi_manager_t *m) { return m->cut.block_bytes; }
static inline gmi_sizes_t gmi_sizes(const gmi_manager_t *m) {
  return (gmi_sizes_t){ gmi_chunk_bytes(m), gmi_frame_bytes(m), m->cut.slot_bytes, m->cut.block_bytes };
}
static inline uint64_t gmi_tier_bytes(const gmi_manager_t *m, uint32_t tier) {
  gmi_sizes_t sizes = gmi_sizes(m);
  return gmi_sizes_tier_bytes(&sizes, tier);
}
static inline uint64_t gmi_copy_bytes(const gmi_manager_t *m, uint32_t from, uint32_t to) {
  gmi_sizes_t sizes = gmi_sizes(m);
  return gmi_sizes_copy_bytes(&sizes, from, to);
}

/* core/links.c */
void gmi_links_open(gmi_manager_t *m); /* all but the streams */
/* The link between two tiers, which there is. */
gmi_link_t *gmi_link(gmi_manager_t *m, uint32_t from_tier, uint32_t to_tier);
/* The two directions of the device's link, which has streams. */
static inline gmi_link_t *gmi_link_in(gmi_manager_t *m) { return gmi_link(m, GEMINI_TIER_HOST, GEMINI_TIER_DEVICE); }
static inline gmi_link_t *gmi_link_out(gmi_manager_t *m) { return gmi_link(m, GEMINI_TIER_DEVICE, GEMINI_TIER_HOST); }
/* That of a transfer of files. */
static inline gmi_link_t *gmi_link_file(gmi_manager_t *m, bool write) {
  return write ? gmi_link(m, GEMINI_TIER_HOST, GEMINI_TIER_FILE) : gmi_link(m, GEMINI_TIER_FILE, GEMINI_TIER_HOST);
}
static inline bool gmi_link_is_fetch(const gmi_link_t *link) { return link->to_tier == GEMINI_TIER_DEVICE; }
void gmi_link_count(gmi_manager_t *m, gmi_link_t *link, uint32_t reason, uint64_t chunks); /* chunks were moved */
void gmi_link_measured(gmi_manager_t *m, gmi_link_t *link);             /* chunk_ns has changed: publishes the rate */
uint64_t gmi_link_rate(const gmi_manager_t *m, const gmi_link_t *link); /* measured, bytes a second; 0: not yet */

/* core/handles.c */
extern uint64_t
    gmi_manager_serial; /* managers opened so far; for tests, which may add to it while no manager is being opened */
bool gmi_manager_enter(gmi_manager_t *m); /* gives it a handle, which is valid from now on; false: too many are open */
void gmi_manager_leave(gmi_manager_t *m); /* its handle, and those of its objects, are not valid any more */
uint32_t gmi_managers_open(void);
gmi_manager_t *gmi_manager_get(gemini_manager_t handle); /* NULL, with the error recorded */
void *gmi_handle(const gmi_manager_t *m, uint32_t type, uint64_t generation, uint32_t index);
void gmi_handle_wrong(uint64_t id, uint32_t type); /* records the error */
static inline uint32_t gmi_handle_index_bits(uint32_t type) {
  return type == GMI_HANDLE_TENSOR   ? GMI_TENSOR_INDEX_BITS
         : type == GMI_HANDLE_ARENA  ? GMI_ARENA_INDEX_BITS
         : type == GMI_HANDLE_STREAM ? GMI_STREAM_INDEX_BITS
         : type == GMI_HANDLE_GRAPH  ? GMI_GRAPH_INDEX_BITS
                                     : 0;
}
/* Is handle of this type and manager? Then its index and generation. Otherwise the error is recorded. Inline, as each
 * acquire and release asks it several times, with a type that is constant there. */
static inline bool gmi_handle_open(const gmi_manager_t *m, const void *handle, uint32_t type, uint32_t *index_out,
                                   uint64_t *generation_out) {
  uint64_t id = gmi_id(handle);
  if (id >> 60 != type || ((id ^ m->identity.id) & GMI_HANDLE_MANAGER_MASK)) {
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
void gmi_lock(gmi_manager_t *m, const char *function); /* function: the public one, for who waits; static storage */
/* The same in the middle of another thread's update callback: for calls that leave chunks' bytes and records alone. */
void gmi_lock_beside(gmi_manager_t *m, const char *function);
/* Lock held, and given up meanwhile: waits until no callback of another thread runs. */
void gmi_callbacks_wait(gmi_manager_t *m, const char *function);
void gmi_callback_begin(gmi_manager_t *m); /* gives up the lock; logs are not sent */
void gmi_callback_end(gmi_manager_t *m, const char *function);
void gmi_unlock(gmi_manager_t *m);                               /* then sends queued logs */
bool gmi_lock_try(gmi_manager_t *m);                             /* false: somebody has it */
void gmi_unlock_quietly(gmi_manager_t *m);                       /* logs stay queued */
void gmi_lock_wait(gmi_manager_t *m, pthread_cond_t *condition); /* lock held: waits without it, and has it again */
bool gmi_lock_is_mine(gmi_manager_t *m);                         /* for assertions; without GEMINI_CHECK, true */
/* All of a public function whose parameter mgr is the manager: call, with m, under its lock. */
#define API_LOCKED(call)                   \
  gmi_manager_t *m = gmi_manager_get(mgr); \
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);   \
  gmi_lock(m, __func__);                   \
  gemini_status_t status = (call);         \
  gmi_unlock(m);                           \
  API_RETURN(status)
void gmi_log(gmi_manager_t *m, int32_t level, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif

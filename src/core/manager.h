/* The manager and what it is made of: the records that every module shares.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Lock: gmi_manager.lock guards everything that is not marked Atomic or Constant. Fast paths (acquire and release of
 * resident tensors) do not take it: they work on the atomic words of tensors and windows, which only the lock's holder
 * may change except for their counts; for parts of tensors they take the lock of a table of leases. User callbacks run
 * without the lock; logs are queued and sent after it. */
#ifndef GMI_MANAGER_H
#define GMI_MANAGER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/status.h"
#include "chunk/heap.h"
#include "chunk/lease.h"
#include "core/events.h"
#include "core/stats.h"
#include "core/watch.h"
#include "device/device.h"
#include "gemini.h"

/* ---- handles: [63:60] type, [59:42] which manager (its slot and the end of its serial number), [41:0] which object.
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

/* ---- fences and streams */
/* Index of GEMINI_STREAM_CALLER where a stream index is wanted. */
#define GMI_CALLER GMI_NONE

/* Uses of a window by streams: fences behind the latest of two streams; a third one waits for one of them first, so
 * that its fence stands for both. Atomic. */
enum { GMI_USES = 2 };
typedef struct gmi_uses {
  _Atomic gmi_fence_t fence[GMI_USES];
} gmi_uses_t;

/* The frame mapped at a chunk's address. The mapping outlives residency, so a chunk that gets the same frame back, as
 * it does in each iteration of a plan, needs no remap. */
typedef struct gmi_mapping {
  uint32_t frame_1; /* index of the frame + 1; 0 = none */
  uint32_t reserved;
  gmi_fence_t left; /* after which queued work does not use the address any more; set when it loses the frame */
} gmi_mapping_t;

/* ---- windows */
#define GMI_WINDOW_RESIDENT (1u << 31) /* has a frame that holds, or will hold once arrive is reached, its bytes */
#define GMI_WINDOW_SETTLED (1u << 30)  /* arrive has been reached, and no update waits */
#define GMI_WINDOW_DIRTY (1u << 29)    /* the device copy is the only valid one */
#define GMI_WINDOW_WRITERS 0x1fff0000u /* of the pins, those that may write */
#define GMI_WINDOW_WRITER 0x00010000u
#define GMI_WINDOW_PINS 0x0000ffffu /* device acquires not yet released */
enum { GMI_VALID_DEVICE = 1, GMI_VALID_HOST = 2, GMI_VALID_FILE = 4, GMI_VALID_ZERO = 8 };

typedef struct gmi_io gmi_io_t;
/* Invariants: valid != 0; RESIDENT <=> frame != GMI_NONE; DIRTY <=> valid == GMI_VALID_DEVICE; VALID_HOST => a slot;
 * VALID_FILE <=> file_block != GMI_NONE; io => a slot; host_writers => not RESIDENT; host_writers <= host_users;
 * graph_held => one of the host_writers. */
typedef struct gmi_window {
  _Atomic uint32_t word;    /* Atomic: GMI_WINDOW_* flags (changed under lock) and counts */
  uint32_t frame;           /* or GMI_NONE */
  gmi_mapping_t mapping;    /* of its address */
  gmi_fence_t arrive;       /* what fills the device copy */
  gmi_uses_t reads, writes; /* Atomic: of the device copy, since it was filled */
  _Atomic uint64_t touched; /* Atomic: the manager's clock at its last release */
  gmi_fence_t copied_out;   /* queued copies out of the frame */
  uint64_t next_use;        /* position of the next use as far as known: iteration * 2^32 + op; 0 = unknown */
  gmi_io_t *io;             /* its transfer from or to a file that has not been noted, or NULL */
  gmi_io_t *failed_read;    /* its last transfer, a read that failed and that nobody has been told of */
  uint32_t slot;            /* on the host, or GMI_NONE */
  uint32_t file_block;      /* or GMI_NONE */
  uint32_t arena;           /* index of the arena that stores it */
  uint32_t index;           /* in that arena */
  uint16_t user_pins;       /* gemini_pin() */
  uint16_t host_users;      /* acquires on the host */
  uint16_t host_writers;    /* of these, those for writing */
  uint8_t valid;            /* GMI_VALID_* */
  bool graph_held;          /* a graph uses it now: it is none of the callers' host_users and host_writers */
  uint16_t graphs;          /* that know the address of its slot, which stays its own */
  uint16_t deferred;        /* pieces of accepted updates of it that have not been queued yet */
  uint16_t left;            /* of these, those that no call under way is about to queue */
  uint16_t batch_users;     /* of host_users, those of the acquire under way: until it is done the window may move */
  bool batch_placed;        /* but for one that has got its place beside its neighbours */
  bool reserved[3];
} gmi_window_t;

/* ---- host slots: places for windows in host memory. What uses a slot's bytes is noted here, whosever they are. */
typedef struct gmi_slot {
  gmi_window_t *window;       /* or NULL */
  gmi_fence_t fence;          /* queued copies that read or write it */
  _Atomic uint64_t work_done; /* Atomic: updates and transfers finished; work_queued when none is pending */
  uint64_t work_queued;
  _Atomic gemini_status_t failure; /* Atomic: of the last read into it */
  bool block;                      /* holds blocks, no window */
} gmi_slot_t;

enum { GMI_UPDATED = 1024 };
typedef struct gmi_host {
  struct gmi_reserve *reserve;
  uint8_t *base;
  uint64_t grain_bytes, part_bytes, part_count;
  uint64_t *committed; /* [part_count] bytes at the part's start that exist and are locked */
  gmi_slot_t *slots;   /* address space for all there can be */
  uint64_t *free_map;  /* bit per slot */
  uint64_t slot_map_bytes, free_map_bytes;
  uint64_t home_end;                     /* slot behind the last home */
  uint32_t slot_count, free_count, hand; /* within the budget */
  uint32_t slot_most;                    /* windows may still lie in as many, behind a smaller budget */
  struct gmi_blocks *blocks;             /* NULL until the first one */
  uint32_t block_slots, reserved2;       /* slots that blocks may lie in */
  uint64_t updated_first, updated_end;   /* the windows of states updated last, in a ring */
  gmi_window_t *updated[GMI_UPDATED];
} gmi_host_t;

/* ---- tensors */
/* A tensor's word: who uses it, what its bytes are, and its state when nobody uses it. The users' fields count acquires
 * not yet released: of the whole tensor on the device, by mode; of all others, which have a lease (chunk/lease.h). */
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
  uint32_t store;     /* arena that owns the windows: itself, or the one it reuses */
  uint32_t followers; /* arenas whose like or store this is */
  bool reused;        /* some arena reuses this one */
  bool reserved[7];
  uint64_t generation;
  uint8_t *base;             /* device addresses */
  uint32_t home, home_count; /* slot of its first window when all fit; how many have a place there */
  uint64_t capacity;         /* bytes, a multiple of the largest window */
  uint64_t capacity_asked;
  _Atomic uint64_t size; /* Atomic: used so far, bytes */
  gmi_window_t *windows; /* address space for all windows of capacity; of the store only */
  uint64_t window_map_bytes;
  _Atomic uint32_t window_count;          /* Atomic: initialised so far */
  uint32_t tensor_count, tensor_capacity; /* of order */
  uint32_t *order;                        /* tensors of this arena, sorted by offset when sorted */
  bool order_sorted;
  uint64_t longest; /* size of the longest tensor it ever had, bytes */
} gmi_arena_t;

/* ---- frames */
typedef struct gmi_frame {
  uint64_t handle;
  uint32_t next, previous; /* in the list of free ones; GMI_NONE ends it */
  bool free;
  gmi_fence_t ready;    /* after which its bytes may be overwritten */
  gmi_window_t *window; /* owner, or NULL: free or the heap's */
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
  _Atomic uint64_t placed; /* Atomic: last mark claimed; a claim comes before the mark is placed */
  void *native;
  uint64_t used; /* hooked: when last named, on hook_clock */
} gmi_stream_t;

/* Running mean of what a window's copy takes over one link, nanoseconds. */
typedef struct gmi_rate {
  double mean;
  uint64_t samples;
} gmi_rate_t;

struct gmi_tracer;
struct gmi_timeline;
struct gmi_window_use;
struct gmi_lane;
struct gmi_store;
struct gmi_sys;
struct gmi_reserve;
struct gmi_deferred;

enum { GMI_TIMED_UPDATE = GEMINI_LINK_COUNT /* beside links: an update on the device */ };
enum { GMI_HIT_STRIPES = 16, GMI_LOG_QUEUE = 8 };
/* A cache line of its own, and its neighbour's, which processors fetch in pairs. */
typedef struct gmi_stripe {
  _Alignas(128) _Atomic uint64_t hits;
} gmi_stripe_t;

typedef struct gmi_manager {
  uint64_t handle;
  uint32_t slot, generation_before; /* generation_before: of all objects, those of earlier managers */
  pthread_mutex_t lock;
  gemini_config_t config;     /* Constant, but the budgets */
  char *file_dir, *keep_name; /* NULL: no files; not kept */
  const gmi_device_ops_t *dev;
  void *dev_self;
  const gmi_events_t *events; /* Constant, as the next two */
  const gmi_advice_t *advice;
  void (*when_locked)(struct gmi_manager *m); /* called with the lock, when hook_waiting is not 0 */
  uint64_t granularity;

  gmi_arena_t *_Atomic arenas[GMI_ARENAS]; /* Atomic */
  uint64_t arena_generations[GMI_ARENAS];  /* the last ones given */
  gmi_tensor_t *tensors;                   /* address space for GMI_TENSORS; Constant */
  uint32_t tensor_high, tensor_free;
  uint32_t *name_buckets, name_bucket_count;
  uint64_t tensor_alive;

  gmi_stream_t streams[GMI_DEVICE_MAX_STREAMS];
  uint32_t copy_in, copy_out, update_stream; /* internal streams */
  _Atomic gmi_fence_t update_end;            /* Atomic: of the last span queued there */

  /* the cut: chosen by gmi_cut() at first need */
  _Atomic uint64_t window_bytes; /* Atomic; 0 = not cut yet */
  uint32_t window_shift;
  uint64_t window_total; /* windows initialised in all arenas */

  gmi_frame_t *frames;
  uint32_t frame_count;                      /* that the budget allows */
  uint32_t frame_capacity;                   /* of the array */
  uint32_t frame_made;                       /* that exist on the device */
  _Atomic uint32_t frame_used;               /* Atomic: owned by windows or heap pages */
  uint32_t free_first, free_last, free_size; /* frames that exist and are unused, given up longest ago first */
  uint32_t *unmade, unmade_size;             /* places in frames[] without a device frame */
  uint32_t resident;                         /* windows with frames */
  _Atomic uint64_t clock;                    /* Atomic: fetches so far; tells which window was used longest ago */
  uint32_t clock_hand;                       /* for victims */

  gmi_heap_t *heap;
  uint8_t *heap_base;
  uint64_t heap_range, page_map_bytes;
  gmi_page_t *pages;
  uint64_t page_high;             /* pages ever touched */
  uint32_t heap_frames;           /* frames under the heap, idle ones included */
  uint64_t nonmodel_peak_op;      /* peak of live bytes since the op began */
  _Atomic uint64_t nonmodel_peak; /* Atomic */
  uint32_t heap_pages_peak_op;

  /* chunk/hook.c */
  pthread_mutex_t hook_lock;        /* guards the next three; after lock, and held for moments only */
  struct gmi_hook_free *hook_frees; /* came while lock was taken, or could not be carried out without waiting */
  uint32_t hook_capacity;
  _Atomic uint32_t hook_waiting;  /* Atomic: of hook_frees; written under hook_lock */
  uint32_t hook_stream;           /* index named last */
  uint64_t hook_clock, hook_live; /* calls that named another stream than the one before; allocations not yet freed */
  bool hook_told;                 /* a failure has been logged */

  /* chunk/graph.c */
  struct gmi_graph *graphs[GMI_GRAPHS];
  uint64_t graph_generations[GMI_GRAPHS]; /* the last ones given */
  uint32_t graph_count, graph_frames;     /* graph_frames: of frame_used, those of graphs */
  _Atomic uint64_t graph_streams;         /* Atomic: bit per stream on which one is begun; written under lock */
  char graph_op[128];                     /* operator that is open in a capture; "": none */

  _Atomic uint64_t host_used; /* Atomic: bytes of host slots */
  _Atomic uint64_t file_used; /* Atomic */
  gmi_host_t host;
  struct gmi_store *files;
  const struct gmi_sys *file_sys; /* NULL: the system's own calls */
  uint64_t file_block_bytes;      /* of files */
  bool checkpointing;             /* blocks in files stay, whatever else their chunks' bytes are in */
  bool kept_used;                 /* the last checkpoint in the files is this process's, or was taken up by it */
  uint32_t io_count, io_writes;   /* transfers not yet noted */
  gmi_io_t *_Atomic io_finished;  /* Atomic: list */
  gemini_status_t io_failure;     /* of a write, to be told once */
  int io_native_code;
  char io_message[384];
  uint64_t io_last_ns; /* when the last one ended */
  struct gmi_lane *lane;
  struct gmi_deferred *deferred; /* what is left of updates */
  struct gmi_tracer *tracer;
  struct gmi_timeline *timeline;

  gmi_rate_t link_ns[2];    /* by GEMINI_LINK_H2D, D2H */
  gmi_rate_t file_ns[2];    /* of a window: read, written */
  gmi_rate_t device_update; /* nanoseconds an element of an update on the device */
  struct {
    gmi_fence_t begin, end;
    uint64_t elements;
    uint32_t link, reserved;
  } timed[64]; /* to be measured */
  uint32_t timed_count;

  /* A device span's callback runs without the lock, in the middle of a call: until it has ended, the calls of other
   * threads that look at chunks wait (gmi_lock()). */
  pthread_cond_t callback_ended; /* with lock */
  pthread_t callback_thread;
  _Atomic uint32_t callbacks; /* Atomic: nested, of that thread; 0: none runs */

  /* brackets */
  _Atomic uint64_t op_serial; /* Atomic: 0 = no op open */
  uint64_t op_serial_next;
  _Atomic uint32_t phase; /* Atomic */
  bool iteration_open;
  bool closing;

  gmi_stripe_t stripes[GMI_HIT_STRIPES]; /* Atomic */
  gmi_stats_t stats;                     /* Atomic */
  gmi_watch_t watch;
  gemini_status_t async_status;
  char async_message[256];
  gmi_leases_t leases;
  struct gmi_leftover *leftovers;

  struct {
    int32_t level;
    char text[240];
  } logs[GMI_LOG_QUEUE];
  uint32_t log_count;
} gmi_manager_t;

/* core/handles.c */
extern uint64_t
    gmi_manager_serial; /* managers opened so far; for tests, which may add to it while no manager is being opened */
bool gmi_manager_enter(gmi_manager_t *m); /* gives it a handle, which is valid from now on; false: too many are open */
void gmi_manager_leave(gmi_manager_t *m); /* its handle, and those of its objects, are not valid any more */
uint32_t gmi_managers_open(void);
gmi_manager_t *gmi_manager_get(gemini_manager_t handle); /* NULL, with the error recorded */
gmi_manager_t *gmi_manager_of(uint64_t handle);          /* of any object's handle; likewise */
uint64_t gmi_handle(const gmi_manager_t *m, uint32_t type, uint64_t generation, uint32_t index);
/* Is handle of this type and manager? Then its index and generation. Otherwise the error is recorded. */
bool gmi_handle_open(const gmi_manager_t *m, uint64_t handle, uint32_t type, uint32_t *index_out,
                     uint64_t *generation_out);

/* core/lock.c */
void gmi_lock(gmi_manager_t *m, const char *function); /* function: the public one, for who waits; static storage */
/* The same in the middle of another thread's update callback: for calls that leave chunks' bytes and records alone. */
void gmi_lock_beside(gmi_manager_t *m, const char *function);
/* Lock held, and given up meanwhile: waits until no callback of another thread runs. */
void gmi_callbacks_wait(gmi_manager_t *m, const char *function);
void gmi_callback_begin(gmi_manager_t *m); /* gives up the lock; logs are not sent */
void gmi_callback_end(gmi_manager_t *m, const char *function);
void gmi_unlock(gmi_manager_t *m); /* then sends queued logs */
/* All of a public function whose parameter mgr is the manager: call, with m, under its lock. */
#define API_LOCKED(call)                   \
  gmi_manager_t *m = gmi_manager_get(mgr); \
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);   \
  gmi_lock(m, __func__);                   \
  gemini_status_t status = (call);         \
  gmi_unlock(m);                           \
  API_RETURN(status)
void gmi_log(gmi_manager_t *m, int32_t level, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* core/streams.c */
/* Index of a user's stream, or GMI_CALLER. */
gemini_status_t gmi_stream_resolve(gmi_manager_t *m, gemini_stream_t stream, uint32_t *index_out);
enum { GMI_STREAMS_LIMIT = 48 }; /* open at once, without the library's own */
/* native: NULL, or where a stream of the caller's own is, to be adopted. Lock held. */
gemini_status_t gmi_stream_open(gmi_manager_t *m, bool internal, void *const *native, uint32_t *index_out);
/* Is it the stream that the GPU's API calls native, adopted or told to the caller? Two names of a stream would be two streams
 * that wait for each other. */
bool gmi_stream_is_native(const gmi_stream_t *s, const void *native);
void gmi_streams_drain(gmi_manager_t *m); /* waits for all work of all streams */

/* The index under which the caller's own stream is known, which adopts it at first; lock held. BUSY: that would wait
 * for the device, which may_block allows. On the simulated device native is a gemini_stream_t. */
gemini_status_t gmi_stream_of_native(gmi_manager_t *m, void *native, bool may_block, uint32_t *index_out);
/* Waits for a stream's work and lets go of it; lock held. A failure leaves the stream as it is. */
gemini_status_t gmi_stream_end(gmi_manager_t *m, uint32_t index);

/* Memory that queued work may still write to, as the device could not be waited for: it goes when the device has been
 * closed. What is kept lies behind this header, in the same allocation. Lock held. */
typedef struct gmi_leftover {
  struct gmi_leftover *next;
  uint64_t reserved;
} gmi_leftover_t;
void gmi_leave_over(gmi_manager_t *m, gmi_leftover_t *memory);

gemini_status_t gmi_device_resize(gmi_manager_t *m, uint64_t memory_bytes); /* the device's budget; lock held */
/* Zeroes device memory in the stream's order; lock held. */
gemini_status_t gmi_device_zero(gmi_manager_t *m, uint32_t stream, void *address, uint64_t bytes);

/* fences; lock held */
gemini_status_t gmi_fence_now(gmi_manager_t *m, uint32_t stream, gmi_fence_t *fence_out);         /* places a mark */
gemini_status_t gmi_fence_now_untimed(gmi_manager_t *m, uint32_t stream, gmi_fence_t *fence_out); /* cheaper */
gemini_status_t gmi_fence_wait(gmi_manager_t *m, uint32_t stream, gmi_fence_t fence); /* GMI_CALLER: blocks */
gemini_status_t gmi_fence_sync(gmi_manager_t *m, gmi_fence_t fence);                  /* blocks; keeps the lock */
bool gmi_fence_reached(gmi_manager_t *m, gmi_fence_t fence);                          /* any thread, no lock */
/* A fence after both; may make one stream wait for the other. */
gmi_fence_t gmi_fence_join(gmi_manager_t *m, gmi_fence_t a, gmi_fence_t b);
/* Fence behind what has been queued on stream so far, placed only when somebody needs it; no lock. 0 for the caller. */
gmi_fence_t gmi_fence_later(gmi_manager_t *m, uint32_t stream);

/* chunk/arena.c */
gmi_arena_t *gmi_arena_get(gmi_manager_t *m, gemini_arena_t handle);
gmi_tensor_t *gmi_tensor_get(gmi_manager_t *m, gemini_tensor_t handle);
uint32_t gmi_tensor_named(gmi_manager_t *m, const char *name); /* index of the registered one, or GMI_NONE */
static inline bool gmi_tensor_alive(const gmi_tensor_t *t) { return atomic_load(&t->life) != 0; }
static inline gmi_arena_t *gmi_arena_at(gmi_manager_t *m, uint32_t index) {
  return atomic_load_explicit(&m->arenas[index], memory_order_acquire);
}
/* A range of windows of the arena that stores it. */
typedef struct gmi_range {
  gmi_arena_t *arena; /* as named by the caller */
  gmi_arena_t *store;
  gmi_tensor_t *tensor; /* or NULL when an arena was named */
  uint64_t offset, size;
  uint32_t first, last; /* windows; first > last when not cut yet or empty */
} gmi_range_t;
/* Resolves the range, and cuts the arenas into windows if they are not yet; nothing is cut for a range that is
 * wrong. */
gemini_status_t gmi_range_ready(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out);
gemini_status_t gmi_range_resolve(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out);
/* The same in two steps: the bytes, for which no lock is needed while a tensor's handle is valid; then their windows,
 * for which the range must be held, or the lock. */
gemini_status_t gmi_range_bytes(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out);
void gmi_range_windows(gmi_manager_t *m, gmi_range_t *range);
/* Arenas in text files (traces, checkpoints), a line "arena ..." for each; lock held. gmi_arena_read() takes the line
 * from behind its first word, finds the arena of this manager that it describes, and enters it into arena_of, which
 * maps arena numbers of the file to this manager's (GMI_NONE: not read yet). Returns NULL, or what is wrong in static
 * words, with the arena's name if that could be read, else "". */
void gmi_arenas_write(gmi_manager_t *m, FILE *file);
const char *gmi_arena_read(gmi_manager_t *m, const char *at, uint32_t arena_of[GMI_ARENAS],
                           char name_out[GMI_ARENA_NAME]);
gemini_status_t gmi_arena_grow(gmi_manager_t *m, gmi_arena_t *store); /* windows for all of size; lock held */
void gmi_arena_sort(gmi_manager_t *m, gmi_arena_t *a);
/* Calls fn for every tensor of arena a that overlaps [offset, offset + size). */
void gmi_arena_each(gmi_manager_t *m, gmi_arena_t *a, uint64_t offset, uint64_t size,
                    void (*fn)(gmi_manager_t *m, gmi_tensor_t *t, void *user), void *user);
void gmi_arena_free_all(gmi_manager_t *m);
bool gmi_state_legal(uint32_t from, uint32_t to);
static inline uint32_t gmi_tensor_state(uint64_t word) {
  return word & GMI_TENSOR_USERS ? GEMINI_STATE_COMPUTE : (uint32_t)(word >> GMI_TENSOR_STATE_SHIFT);
}
static inline uint64_t gmi_tensor_word(uint64_t word, uint32_t state) {
  return (word & ((UINT64_C(1) << GMI_TENSOR_STATE_SHIFT) - 1)) | (uint64_t)state << GMI_TENSOR_STATE_SHIFT;
}
static inline gmi_tensor_t *gmi_tensor_base(gmi_manager_t *m, gmi_tensor_t *t) { return &m->tensors[t->base]; }

/* chunk/cut.c; lock held */
#define GMI_WINDOW_MAX (UINT64_C(64) << 20) /* bytes, of those that are searched */
/* The window size that fits the uses best, the smallest when there are none; bytes_per_s: of the links, 0 = as to be
 * expected of the device. */
uint64_t gmi_window_search(gmi_manager_t *m, const struct gmi_window_use *uses, uint64_t count, uint64_t nonmodel,
                           uint64_t bytes_per_s);
gemini_status_t gmi_cut(gmi_manager_t *m); /* chooses the window size if that is still to be done */
/* Cuts anew where that is possible: nothing in use, every byte fits on the host, no file tier, and the caller did not
 * choose the size. Otherwise, and when it is that size already, nothing changes. After it no record of a window is
 * where it was: nobody may keep one, and plans do. OOM_SYSTEM, or what moving bytes to the host fails with: nothing
 * changed. */
bool gmi_recut_possible(gmi_manager_t *m, uint64_t window_bytes);
gemini_status_t gmi_recut(gmi_manager_t *m, uint64_t window_bytes);

/* chunk/residency.c; lock held */
enum { GMI_MOVE_NAME_BYTES = 128 };
/* What a move is called, in timelines and in Nsight Systems. */
void gmi_move_name(gmi_manager_t *m, const gmi_window_t *w, uint32_t reason, char name_out[GMI_MOVE_NAME_BYTES]);
enum { GMI_TAKE_EVICT = 1 /* evict when nothing is free */ };
/* mapping: of the address that the frame is for, which gets the one it had if that is free; or NULL. */
gemini_status_t gmi_frame_take(gmi_manager_t *m, const gmi_mapping_t *mapping, uint32_t reason, uint32_t flags,
                               uint32_t *frame_out);
void gmi_frame_give(gmi_manager_t *m, uint32_t frame, gmi_fence_t ready);
/* Gives the window a frame and starts bringing its bytes; fresh: they will all be overwritten, nothing comes, and the
 * caller goes on to gmi_window_wrote(), or to gmi_window_evict() when its batch fails. */
gemini_status_t gmi_window_fetch(gmi_manager_t *m, gmi_window_t *w, bool fresh, uint32_t reason, uint32_t flags);
/* Takes the frame away, writing back first when the device copy is the only one. BUSY when pinned or acquired. */
gemini_status_t gmi_window_evict(gmi_manager_t *m, gmi_window_t *w, uint32_t reason);
/* Makes the host copy valid (once its slot is quiet: gmi_window_settle_host()); keeps the device copy unless drop. BUSY
 * when the device copy is acquired for writing, or where it must go, at all. */
gemini_status_t gmi_window_to_host(gmi_manager_t *m, gmi_window_t *w, bool drop, uint32_t reason);
/* The device copy goes without a copy of its bytes; nobody may hold it. */
void gmi_window_drop_device(gmi_manager_t *m, gmi_window_t *w);
gemini_status_t gmi_window_to_file(gmi_manager_t *m, gmi_window_t *w, uint32_t reason);
void gmi_window_forget(gmi_manager_t *m, gmi_window_t *w); /* its bytes become zero; not pinned, nothing pending */
void gmi_window_wrote(gmi_manager_t *m, gmi_window_t *w);  /* the device copy becomes the only valid one */
void gmi_window_host_wrote(gmi_manager_t *m, gmi_window_t *w);
/* Behind what wrote the device copy last; behind everything that used it. May make streams wait for each other. */
gmi_fence_t gmi_window_written(gmi_manager_t *m, gmi_window_t *w);
gmi_fence_t gmi_window_used(gmi_manager_t *m, gmi_window_t *w);
/* Makes stream wait for what gmi_window_used() is behind, or for reading, gmi_window_written(). */
gemini_status_t gmi_window_wait(gmi_manager_t *m, uint32_t stream, gmi_window_t *w, uint32_t mode);
void gmi_uses_clear(gmi_uses_t *uses);
/* Sends whoever wants the window from now on to the slow path, which needs the lock. false, and nothing changed: the
 * word has one of the bits of unless. */
bool gmi_window_unsettle(gmi_window_t *w, uint32_t unless);
/* access.c: notes a use of the device copy by what stream has queued so far. locked: the lock is held. */
gemini_status_t gmi_window_use(gmi_manager_t *m, gmi_window_t *w, uint32_t mode, uint32_t stream, bool locked);
uint8_t *gmi_window_device(gmi_manager_t *m, const gmi_window_t *w);
/* Maps an address of a window, or of the heap's page, to a frame. */
gemini_status_t gmi_map(gmi_manager_t *m, void *address, uint32_t frame, gmi_mapping_t *mapping);
/* It has lost its frame; queued work may use it until the fence is reached. */
void gmi_map_leave(gmi_manager_t *m, void *address, gmi_mapping_t *mapping, gmi_fence_t fence);
/* Waits for queued work, and takes away access: from all windows of an arena, or from everything that is mapped. */
void gmi_arena_unmap(gmi_manager_t *m, const gmi_arena_t *store);
void gmi_unmap_all(gmi_manager_t *m);
void gmi_reap(gmi_manager_t *m);                                /* reads the times of finished copies */
uint32_t gmi_frames_of(const gmi_manager_t *m, uint32_t shift); /* that the budget allows, of windows of 1 << shift */
gemini_status_t gmi_frames_resize(gmi_manager_t *m, uint32_t frame_count);
void gmi_frames_free(gmi_manager_t *m);
gemini_status_t gmi_oom_device(gmi_manager_t *m, uint64_t need_bytes);
bool gmi_window_check(gmi_manager_t *m, const gmi_window_t *w);
void gmi_rate_add(gmi_rate_t *rate, double ns);
gmi_arena_t *gmi_window_arena(gmi_manager_t *m, const gmi_window_t *w);

/* chunk/host.c; lock held */
gemini_status_t gmi_host_open(gmi_manager_t *m);
void gmi_host_blocks_close(
    gmi_manager_t *m);                 /* ends all blocks; arenas still exist, as slots that come back look at them */
void gmi_host_close(gmi_manager_t *m); /* nothing uses the memory any more */
gemini_status_t gmi_host_resize(gmi_manager_t *m, uint64_t bytes); /* what lies behind a smaller budget moves */
/* Without a file tier: is there room on the host for need_bytes of chunks, beside blocks and beside those other chunks
 * that must stay there? inside: is the chunk one of those? OOM_HOST: what names them in the message ("the update"). */
gemini_status_t gmi_host_fits(gmi_manager_t *m, const char *what, uint64_t need_bytes,
                              bool (*inside)(const void *user, const gmi_window_t *w), const void *user);
gemini_status_t gmi_host_slot_take(gmi_manager_t *m, gmi_window_t *w);
void gmi_host_slot_bind(gmi_manager_t *m, gmi_window_t *w, uint32_t slot); /* a free one, whose memory exists */
void gmi_host_slot_drop(gmi_manager_t *m, gmi_window_t *w);
/* Makes so many slots free, writing to files if need be. Blocks for that. */
gemini_status_t gmi_host_room(gmi_manager_t *m, uint32_t count);
/* The same without blocking: what there is free may be less. Writes go on until ahead slots, not fewer, will be
 * free. */
gemini_status_t gmi_host_room_soon(gmi_manager_t *m, uint32_t count, uint32_t ahead);
void gmi_host_updated(gmi_manager_t *m, gmi_window_t *w);  /* its states will not be wanted for an iteration */
uint64_t gmi_host_blocks(gmi_manager_t *m);                /* bytes in live blocks */
void gmi_host_released(gmi_manager_t *m, gmi_window_t *w); /* nobody has its address any more */
void gmi_host_forget(gmi_manager_t *m);                    /* windows are about to go */
uint32_t gmi_host_free(const gmi_manager_t *m);            /* slots that windows may get with none leaving */
void gmi_host_homes(gmi_manager_t *m,
                    uint32_t shift); /* says where arenas lie when all fits, by windows of 1 << shift */
gemini_status_t gmi_host_commit(gmi_manager_t *m, uint64_t begin, uint64_t size); /* makes bytes of it exist */
/* Gives windows slots side by side; their bytes, and others' in the way, move. Blocks until these are quiet.
 * OOM_HOST: no room, or windows that are acquired lie in the way. */
gemini_status_t gmi_host_run(gmi_manager_t *m, gmi_arena_t *store, uint32_t first, uint32_t count);
uint8_t *gmi_slot_address(const gmi_manager_t *m, uint32_t slot);
uint8_t *gmi_window_host(gmi_manager_t *m, const gmi_window_t *w); /* NULL: it has no slot */
/* Where a range lies on the host, whose windows are side by side there. */
static inline uint8_t *gmi_range_host(gmi_manager_t *m, const gmi_arena_t *store, uint64_t offset) {
  uint8_t *window = gmi_window_host(m, &store->windows[offset >> m->window_shift]);
  return window ? window + (offset & ((UINT64_C(1) << m->window_shift) - 1)) : NULL;
}
void gmi_window_refilled(gmi_manager_t *m, gmi_window_t *w); /* its slot gets other bytes than the last read's */
bool gmi_window_work_pending(const gmi_manager_t *m, const gmi_window_t *w);
/* Blocks until its slot is quiet. Fails when what filled it failed: device work, or a read from its file. */
gemini_status_t gmi_window_settle_host(gmi_manager_t *m, gmi_window_t *w);

/* chunk/graph.c; lock held */
static inline bool gmi_graph_begun(gmi_manager_t *m, uint32_t stream) { /* any thread, no lock */
  return stream != GMI_CALLER && atomic_load_explicit(&m->graph_streams, memory_order_relaxed) >> stream & 1;
}
/* Is the stream being captured for a graph that was begun on it? Then acquires and releases on it are these: */
gemini_status_t gmi_graph_captures(gmi_manager_t *m, uint32_t stream, bool *captures_out);
gemini_status_t gmi_graph_acquire(gmi_manager_t *m, gemini_access_t *accesses, uint64_t count, uint32_t stream);
gemini_status_t gmi_graph_release(gmi_manager_t *m, const gemini_access_t *accesses, uint64_t count, uint32_t stream);
gemini_status_t gmi_graph_op_begin(gmi_manager_t *m, const char *name);
bool gmi_graph_op_end(gmi_manager_t *m);                             /* false: none is open in a capture */
bool gmi_graph_uses_stream(const gmi_manager_t *m, uint32_t stream); /* begun, or entered, on it */
bool gmi_graphs_busy(const gmi_manager_t *m);                        /* one is begun and not ended, or entered */
void gmi_graphs_free(gmi_manager_t *m);

/* chunk/nonmodel.c; lock held */
void gmi_heap_close(gmi_manager_t *m);
bool gmi_heap_reclaim(gmi_manager_t *m, uint32_t *frame_out); /* an idle page's frame */
/* stream: an index, or GMI_CALLER */
gemini_status_t gmi_nonmodel_alloc(gmi_manager_t *m, uint64_t size, uint32_t stream, void **ptr_out);
bool gmi_nonmodel_free(gmi_manager_t *m, void *ptr, uint32_t stream); /* false, with the error recorded */

/* chunk/hook.c */
void gmi_hook_drain(gmi_manager_t *m); /* frees what waits for the lock, which is held */
void gmi_hook_close(gmi_manager_t *m); /* no hook call uses the manager any more, nor will; without lock */
bool gmi_hook_left(const void *base,
                   uint64_t range); /* may frees of a closed manager's, or the parent's, pointers name it? */

/* core/lane.c: host workers */
typedef struct gmi_job gmi_job_t;
struct gmi_job {
  gmi_job_t *next, *previous;
  uint64_t number;   /* in the order of submission, from 1 */
  uint64_t next_use; /* of the chunks, position as of gmi_window_t; set by the caller, as what follows */
  gemini_update_fn fn;
  void *user;
  gemini_update_span_t span;
  uint8_t *const *windows[8]; /* of the span's arenas: where each lies, in the place of ptr; NULL: ptr has all */
  uint32_t fence_count, slot_count, zero_count;
  bool deferred;       /* it was; gmi_lane_deferred() counts it */
  bool norm;           /* it changes nothing: who waits for it looks whether fn ran, and a failure is no update's */
  gmi_fence_t *fences; /* device work to wait for */
  gmi_slot_t **slots;  /* whose work_done grows when this is done */
  uint64_t *after;     /* [slot_count] work_done to wait for first */
  struct {
    void *address;
    uint64_t bytes;
  } *zeros;                  /* to clear before fn runs */
  uint32_t element_bytes[8]; /* of the span's arenas */
  /* the lane's own */
  uint64_t next_element, done_elements; /* of the span: handed to workers, done */
  gmi_job_t *next_ready;
  uint32_t state, reserved;
};
enum {
  GMI_LANE_SLICE = 1 << 18
}; /* elements that a worker takes at once, at most: some 7 MB of memory, less than a millisecond */
gemini_status_t gmi_lane_open(gmi_manager_t *m, uint32_t threads);
void gmi_lane_close(gmi_manager_t *m);                /* finishes what is queued */
void gmi_lane_push(gmi_manager_t *m, gmi_job_t *job); /* takes the job: one allocation, freed when done */
uint64_t gmi_lane_pending(gmi_manager_t *m);
uint64_t gmi_lane_deferred(gmi_manager_t *m); /* of these, those that were deferred */
void gmi_lane_nudge(gmi_manager_t *m);        /* as if something had ended */
/* Blocks until nothing is pending. function: that waits; NULL: the lock is held. */
void gmi_lane_drain(gmi_manager_t *m, const char *function);
void gmi_lane_wait_slot(gmi_manager_t *m, gmi_slot_t *slot, uint64_t count); /* blocks; lock held */
/* Other work on a slot is over: its user, its failure. Any thread, no lock. */
void gmi_lane_work_done(gmi_manager_t *m, gmi_slot_t *slot, gemini_status_t status, const char *message);
uint64_t gmi_lane_events(gmi_manager_t *m); /* jobs and other work that are over */
/* Blocks until there are more; lock held, and kind says what for. The other is for threads of the library's own,
 * without. */
void gmi_lane_wait_event(gmi_manager_t *m, uint64_t events, gmi_wait_kind_t kind, uint64_t number);
void gmi_lane_idle(gmi_manager_t *m, uint64_t events);
double gmi_lane_ns_per_element(gmi_manager_t *m);   /* of updates */
gemini_status_t gmi_lane_failure(gmi_manager_t *m); /* of an update; stays: bytes are wrong from then on */
/* For timelines: when workers ran. Hands out the oldest ones and forgets them; what nobody asks for is lost. */
typedef struct gmi_lane_span {
  uint64_t begin_ns, end_ns;
  uint32_t worker, norm; /* norm: of one, else of an update */
} gmi_lane_span_t;
void gmi_lane_record(gmi_manager_t *m, bool on);
uint32_t gmi_lane_recorded(gmi_manager_t *m, gmi_lane_span_t *spans_out, uint32_t limit);

/* chunk/data.c; lock held: gradients in reusing arena a become zeros that are their parameters'. BUSY: some are
 * acquired */
gemini_status_t gmi_gradients_drop(gmi_manager_t *m, gmi_arena_t *a);

/* chunk/update.c */
/* Elements in one span of an update over these arenas: one window of the arena with the smallest elements. */
uint64_t gmi_piece_elements(gmi_manager_t *m, const uint32_t *arenas, uint32_t arena_count, uint64_t window_bytes);
/* Deferred pieces, of so many windows each, that may be read, updated and written at once. */
uint32_t gmi_updates_ahead(const gmi_manager_t *m, uint32_t windows);
gemini_status_t gmi_updates_finish(gmi_manager_t *m, const char *function); /* blocks; without lock */
/* Lock held. Queues what is left of updates of a window, and what is left before it, now; NULL: of all. Blocks until
 * there is room; fails when it cannot be queued, and it is left as it is. */
gemini_status_t gmi_updates_queue(gmi_manager_t *m, const gmi_window_t *w);
uint64_t gmi_updates_deferred(const gmi_manager_t *m); /* pieces that are left */
void gmi_updates_room(gmi_manager_t *m);               /* there may be room now for what is left */
gemini_status_t gmi_updates_open(gmi_manager_t *m);
void gmi_updates_close(gmi_manager_t *m);

/* chunk/files.c; lock held */
extern const struct gmi_sys *gmi_files_sys; /* of managers opened from now on; for tests. NULL: the system's own */
gemini_status_t gmi_files_open(gmi_manager_t *m);
uint32_t gmi_files_engine(gmi_manager_t *m); /* GEMINI_FILE_ENGINE_*; AUTO: there is no file tier */
void gmi_files_close(gmi_manager_t *m);
gemini_status_t gmi_files_cut(gmi_manager_t *m, uint64_t window_bytes); /* no window has a block */
/* Start a transfer between the window's slot and its block, or a new one. It counts as work on the slot. */
gemini_status_t gmi_file_write(gmi_manager_t *m, gmi_window_t *w, uint32_t reason);
gemini_status_t gmi_file_read(gmi_manager_t *m, gmi_window_t *w, uint32_t reason);
void gmi_files_poll(gmi_manager_t *m); /* notes what finished transfers did */
/* The same. Fails when of's bytes did not come; of NULL: when a write failed. */
gemini_status_t gmi_files_reap(gmi_manager_t *m, gmi_window_t *of);
void gmi_file_supersede(gmi_window_t *w); /* its bytes are about to be overwritten elsewhere */
void gmi_file_forgive(gmi_window_t *w);   /* nobody wants any more what could not be read */
void gmi_file_drop(gmi_manager_t *m, gmi_window_t *w);
void gmi_files_shrink(gmi_manager_t *m, uint64_t bytes); /* to so many, as far as no bytes are lost */
gemini_status_t gmi_files_resize(gmi_manager_t *m, uint64_t bytes);
/* Host memory that transfers will use from now on, or not any more (then none uses it). */
void gmi_files_buffer(gmi_manager_t *m, void *base, uint64_t size, bool add);

#endif

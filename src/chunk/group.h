/* Groups of ranks: their communicators and streams. The caller holds the manager's lock, unless a comment says
 * otherwise.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_GROUP_H
#define GMI_GROUP_H

#include "comm/comm.h"
#include "core/manager.h"

/* One kind of collectives of a group as a link: the time of a whole chunk. What a rank measures includes waits for
 * ranks that come later, so the shortest time counts, and of the ranks the slowest. */
typedef struct gmi_group_link {
  uint64_t shortest_ns; /* measured here; 0: not yet */
  uint64_t agreed_ns;   /* the longest of all ranks' shortest times when they agreed last; 0: not yet */
} gmi_group_link_t;

/* What a rank says where ranks meet in a call (chunk/group_checkpoint.c). */
typedef struct gmi_report {
  int64_t native_code;
  int32_t status;
  uint32_t done; /* has nothing left to write, or to read */
  uint64_t values[3];
  char message[440];
} gmi_report_t;

enum {
  GMI_GATHERS_HELD = 8,  /* most gathers that are queued together: beyond it, each costs as much as the one before */
  GMI_BUCKET_CHUNKS = 16 /* most chunks whose gradients are added together */
};

/* The latest calls of a kind that were queued, for dumps: all whose end has not been reached, as long as they are no
 * more than there is room for. */
enum { GMI_QUEUED = 64 };
typedef struct gmi_queued {
  struct {
    char label[GMI_COMM_LABEL_BYTES];
    uint32_t chunks;
    gmi_fence_t end; /* behind the call */
  } at[GMI_QUEUED];
  uint64_t calls, chunks; /* so far; the latest call is at[(calls - 1) % GMI_QUEUED] */
} gmi_queued_t;
void gmi_queued_add(gmi_queued_t *q, const char *label, uint32_t chunks, gmi_fence_t end);

/* Gathers and sums have a communicator and a stream each: a communicator carries out its calls in the order of the
 * calls, and a sum must not wait for the gathers that were queued before it. Exchanges have a third one where they must
 * not run beside a collective of the same communicator, as over NCCL; over shared memory they may. */
typedef struct gmi_group {
  uint32_t index;
  uint64_t generation;
  uint32_t rank, ranks; /* of all replicas, which exchange */
  /* gather and reduce have the rank and ranks of the replica, among which chunks are divided. exchange.ops NULL: there
   * is no third one */
  gmi_comm_t gather, reduce, exchange;
  /* Atomic: its device hears of a failure of a communicator that queues; NULL: not yet, or never. A word that nothing
   * depends on: it is stored before the first collective, and loaded by failures. */
  _Atomic(gmi_manager_t *) tells;
  uint32_t gather_stream, reduce_stream;
  uint32_t arenas;       /* sharded arenas of the group */
  uint64_t bucket_bytes; /* of gradients that are added together (gmi_bucket_chunks()) */
  bool exchanging;       /* a gemini_group_exchange() is under way, without the lock */
  struct {               /* a thread that polls the communicators, unless they are over shared memory */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool runs, ends; /* runs: guarded by the manager's lock; ends: by lock */
  } watch;
  struct { /* gathers that are to be queued together; what they wait for has been queued */
    void *buffers[GMI_GATHERS_HELD];
    uint32_t count;
    uint64_t slice_bytes;             /* of each */
    gmi_fence_t begin;                /* before the first one */
    char label[GMI_COMM_LABEL_BYTES]; /* of the first one */
  } held;
  uint64_t gathered_chunks, gathered_bytes, reduced_chunks, reduced_bytes, fetched_bytes, stored_bytes;
  gmi_group_link_t gathers, sums;
  struct {
    uint64_t gathered, reduced, fetched; /* by the plan that was followed last, bytes of an iteration; 0: no plan */
    uint32_t changes; /* iterations that did not follow to their end the plan with which they began */
  } planned;
  /* Digests of the order in which gathers were queued since the last post (chunk/group_check.h), and sums of gradients
   * that reuse bytes. Other sums may come at other points of the ranks' programs, in parts. 0: none. */
  struct {
    uint64_t gathers, sums;
  } queued;
  struct {
    gmi_queued_t gathers, sums;
  } latest;
  struct {       /* chunk/registered.c; at: [capacity], by frame; NULL: none yet */
    bool wanted; /* frames that are gathered into are registered with the communicator of gathers */
    struct gmi_registration *at;
    uint32_t capacity;
  } registered;
  struct { /* of operators, gemini_group_stats_t; and the latest fences behind sums */
    uint64_t gather_ns, sum_ns;
    gmi_fence_t sum_ends[64];
    uint32_t sum_next;
  } waits;
  struct gmi_group_check *check; /* NULL: there is one rank; owned */
  gmi_report_t *reports;         /* one for each rank, so that no rank lacks memory for telling others; owned */
} gmi_group_t;

/* What a stream waits for that waits for a fence: a gather of a group, or a sum of its gradients that the fence is
 * behind and that has not ended. NULL: neither. */
typedef enum { GMI_WAITS_GATHER, GMI_WAITS_SUM } gmi_group_wait_t;
gmi_group_t *gmi_group_waited(gmi_manager_t *m, gmi_fence_t fence, gmi_group_wait_t *what_out);
/* A fence is behind a sum; or it is so if another one is. */
void gmi_group_sum_ends(gmi_group_t *g, gmi_fence_t fence);
void gmi_group_sum_delays(gmi_manager_t *m, gmi_group_t *g, gmi_fence_t other, gmi_fence_t fence);

gmi_group_t *gmi_group_get(gmi_manager_t *m, gemini_group_t handle); /* NULL, with the error recorded */
static inline gmi_group_t *gmi_group_at(const gmi_manager_t *m, uint32_t index) { return m->groups.at[index]; }
/* The first failure that a group has noticed, recorded; GEMINI_OK: none. */
gemini_status_t gmi_groups_failure(gmi_manager_t *m);
/* The same of failures that are known already, for each gather and sum: those of communicators that have to be asked
 * are noticed by the thread that watches them, within 50 ms. */
gemini_status_t gmi_groups_known(gmi_manager_t *m);
/* Where a frame is gathered into if the group registers frames; NULL: at the address of its chunk. */
void *gmi_registered_address(gmi_manager_t *m, gmi_group_t *g, uint32_t frame);
/* Before a frame is destroyed, when no work uses it; before a group's communicators are closed. */
void gmi_registered_leave(gmi_manager_t *m, uint32_t frame);
void gmi_registered_end(gmi_group_t *g);
/* Queues the gather of a chunk on the group's stream: slices of slice_bytes each, and rest_bytes behind them, which
 * equal slices leave over and which become those of the last rank. name, chunk: of the arena, for messages of this rank
 * and others. *arrive_out is reached when the chunk is complete.
 *
 * In a batch, gathers may be held back, to be queued together, at the latest where the batch ends. All ranks have the
 * same batches, in which nothing but a failure places a mark on the stream: then they queue the same ones together.
 * Batches nest. A failure to queue some is one of the whole group; whichever call queues them returns it.
 * gmi_gather_batch_end() returns status, if that is OK a failure of its own. If it is not OK, the call that made the
 * batch may be made again, and must not queue other gathers then than other ranks, which NCCL would not notice. So a
 * group fails with its words if gathers are held back, or, anew, if any of the batch were queued: anew, the call drops
 * what it has gathered and gathers it again. */
gemini_status_t gmi_group_gather(gmi_manager_t *m, gmi_group_t *g, void *buffer, uint64_t slice_bytes,
                                 uint64_t rest_bytes, const char *name, uint32_t chunk, gmi_fence_t *arrive_out);
void gmi_gather_batch_begin(gmi_manager_t *m);
gemini_status_t gmi_gather_batch_end(gmi_manager_t *m, gemini_status_t status, bool anew);
/* What was to be done for the next gather of a batch has failed with status, the thread's last error, which it returns.
 * Gathers that are held back are never queued: the group fails. */
gemini_status_t gmi_gather_batch_fails(gmi_manager_t *m, gmi_group_t *g, gemini_status_t status);
gemini_status_t gmi_group_queue_held(gmi_manager_t *m, uint32_t stream);
/* Queues the sums of the gradients of buffer_count chunks, at most GMI_BUCKET_CHUNKS, each with a slice of slice_count
 * values for each rank. chunk: the first one's. */
gemini_status_t gmi_group_reduce(gmi_manager_t *m, gmi_group_t *g, void *const *buffers, uint32_t buffer_count,
                                 uint64_t slice_count, uint32_t dtype, const char *name, uint32_t chunk);
/* The same of what equal slices of a chunk leave over: buffer becomes the sum. */
gemini_status_t gmi_group_reduce_rest(gmi_manager_t *m, gmi_group_t *g, void *buffer, uint64_t count, uint32_t dtype,
                                      const char *name, uint32_t chunk);
/* A gemini_group_exchange() of the library's own. Blocks, with the lock held. */
gemini_status_t gmi_group_exchange_locked(gmi_manager_t *m, gmi_group_t *g, const void *mine, uint64_t size_bytes,
                                          void *all_out, const char *label);
/* Adds a value of each rank of the replica, in the order of ranks. Blocks. PEER: it is another one in another replica,
 * whose ranks have other bytes in their slices. */
gemini_status_t gmi_group_sum(gmi_manager_t *m, gmi_group_t *g, const char *label, double *sum);
/* The first failure that this group has noticed, recorded; GEMINI_OK: none. Any thread, no lock. */
gemini_status_t gmi_group_failure(const gmi_group_t *g);
/* After the failure of one communicator, calls of the others would wait until their own deadline, or be told that this
 * rank has left: they end with the same words. Returns the failure. Any thread, no lock. */
gemini_status_t gmi_group_spread_failure(const gmi_group_t *g);
/* Makes all calls of all ranks fail with these words, unless they fail already. Any thread, no lock. */
enum { GMI_GROUP_WHY_BYTES = 376 };
void gmi_group_give_up(const gmi_group_t *g, const char *why);
/* Gives up, for status, the thread's last error, which it returns: a collective has been queued, and what belongs
 * behind it has not. Made again it would be another call, which the other ranks do not make. */
gemini_status_t gmi_group_breaks_off(const gmi_group_t *g, gemini_status_t status);
/* Ends all groups. No lock: no other thread uses the manager. */
void gmi_groups_close(gmi_manager_t *m);

#endif

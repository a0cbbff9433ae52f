/* Communicators: collective operations of a group of processes, the ranks.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A communicator is a table of functions over a state of its own. All ranks must call the same functions with equal
 * sizes in the same order. A call that cannot complete, because another rank ended, left, gave up or called something
 * else, fails with GEMINI_ERR_PEER within the deadline; the message names the rank and, on both sides, what was called.
 * After the first failure every later call fails the same way on all ranks.
 *
 * Replicas. A communicator can be of several replicas, of as many ranks each; replica 0 has the first ranks. rank,
 * ranks and root are then those within the replica. Gathers and broadcasts stay within it. Reductions are over all
 * ranks of all replicas: first within each, as its reductions are, rounded to dtype; then these results over the
 * replicas, in their order, rounded again. exchange() is among all ranks of all replicas, in their order. Messages
 * number all ranks.
 *
 * Threads: collectives of one communicator are called by one thread at a time; exchange() by one thread at a time, also
 * beside a collective; the others by any thread. */
#ifndef GMI_COMM_H
#define GMI_COMM_H

#include <stdbool.h>
#include <stdint.h>

#include "device/sum.h"
#include "gemini.h"
#include "gemini/group.h"

enum {
  GMI_COMM_RANKS = 1024,     /* most ranks of a group */
  GMI_COMM_LABEL_BYTES = 96, /* of a label, with the NUL; longer ones are cut */
  GMI_COMM_ID_BYTES = 128
};

/* Names a group that is being formed. Rank 0 makes it, and the caller brings it to the other ranks. */
typedef struct gmi_comm_id {
  uint8_t bytes[GMI_COMM_ID_BYTES];
} gmi_comm_id_t;

typedef struct gmi_comm_config {
  uint32_t rank, ranks;
  uint64_t deadline_ns; /* the longest wait for another rank that makes no progress; 0: 10 seconds */
  uint32_t shard_ranks; /* of a replica, divides ranks; 0: there is one replica, of all ranks */
} gmi_comm_config_t;
static inline uint32_t gmi_comm_shard_ranks(uint32_t ranks, uint32_t shard_ranks) {
  return shard_ranks ? shard_ranks : ranks;
}

/* label: what the call is for, such as an operator and a chunk; for messages. */
typedef struct gmi_comm_ops {
  const char *name; /* static storage */
  /* Do collectives queue work on `stream` (the device's own handle) and return? Otherwise they ignore it and block
   * until the buffer is complete, and are called in stream order by the stream itself. */
  bool queues;

  /* buffer holds a slice of slice_bytes for each rank; this rank's own slice becomes the same slice on all ranks. */
  gemini_status_t (*all_gather)(void *self, void *buffer, uint64_t slice_bytes, void *stream, const char *label);
  /* As all_gather() of each of `count` buffers, in this order; other ranks do the same in one call, too. Faster where
   * queueing a collective takes long. NULL: no faster way is known. */
  gemini_status_t (*all_gathers)(void *self, void *const *buffers, uint32_t count, uint64_t slice_bytes, void *stream,
                                 const char *label);
  /* Optional, and NULL or not together. Tells the communicator that gathers will often run within these bytes of device
   * memory, which stay mapped where they are until unregister_memory(). Each rank for itself, between collectives; no
   * collective of the bytes may be under way when they are unregistered. A failure fails nothing else. */
  gemini_status_t (*register_memory)(void *self, void *memory, uint64_t bytes, void **handle_out);
  void (*unregister_memory)(void *self, void *handle);
  /* buffer becomes that of rank `root` on all ranks. */
  gemini_status_t (*broadcast)(void *self, void *buffer, uint64_t bytes, uint32_t root, void *stream,
                               const char *label);
  /* buffer holds a slice of slice_count values for each rank; this rank's own slice becomes its reduction over all
   * ranks. The other slices are undefined afterwards. */
  gemini_status_t (*reduce_scatter)(void *self, void *buffer, uint64_t slice_count, uint32_t dtype, gmi_reduce_t reduce,
                                    void *stream, const char *label);
  /* As reduce_scatter() of each of `buffer_count` buffers, in this order; other ranks do the same in one call, too.
   * NULL: no faster way is known. */
  gemini_status_t (*reduce_scatters)(void *self, void *const *buffers, uint32_t buffer_count, uint64_t slice_count,
                                     uint32_t dtype, gmi_reduce_t reduce, void *stream, const char *label);
  gemini_status_t (*all_reduce)(void *self, void *buffer, uint64_t count, uint32_t dtype, gmi_reduce_t reduce,
                                void *stream, const char *label);
  /* Brings `bytes` bytes of each rank to all, in host memory: all_out gets them in the order of ranks. Blocks. */
  gemini_status_t (*exchange)(void *self, const void *mine, uint64_t bytes, void *all_out, const char *label);
  /* What this rank has done other than expected, for the message of a rank that waits in vain; "" takes it back. Never
   * blocks. May be NULL. */
  void (*note)(void *self, const char *text);
  /* The failure that later calls would return; GEMINI_OK: none is known. Looks for one: asks NCCL and the driver, or
   * the caller's function. Never blocks. */
  gemini_status_t (*poll)(void *self);
  /* The same without looking: for callers that another thread polls for. */
  gemini_status_t (*known)(void *self);
  /* Makes all calls of all ranks fail, those under way included. why: for the other ranks' messages. Never blocks. */
  void (*abort)(void *self, const char *why);
  /* Leaves the group and frees the communicator. Other ranks' later calls fail. No other call may run. NULL is
   * accepted. */
  void (*close)(void *self);
} gmi_comm_ops_t;

/* Hears of the failure of a communicator that queues, before it makes its queued work end: from then on, queued work
 * may end without its bytes. failed() is called once, by any thread, inside a call of the communicator, which it must
 * not call; it must not block. NULL: nobody. */
typedef struct gmi_comm_listener {
  void (*failed)(void *user);
  void *user;
} gmi_comm_listener_t;

typedef struct gmi_comm {
  const gmi_comm_ops_t *ops;
  void *self;
  uint32_t rank, ranks;
} gmi_comm_t;

/* Processes of one machine, over shared memory without a name: for the simulated device, whose memory is the host's.
 * The memory goes when the last rank has closed it or ended, however it ended. Nothing of it is left in a file system,
 * and only processes of the same user, which rank 0 has given the id, can open it.
 *
 * gmi_comm_shared_id() makes the memory. The process that calls it becomes rank 0: the memory can be joined through it
 * until its gmi_comm_shared_join() returns. */
gemini_status_t gmi_comm_shared_id(uint32_t ranks, gmi_comm_id_t *id_out);
/* Gives back the descriptor of an id that this process has made and will not join with. Another process's stays. */
void gmi_comm_shared_id_end(const gmi_comm_id_t *id);
/* Blocks until all ranks have joined.
 * INVALID: id, rank or ranks are not of one group, or shard_ranks does not divide ranks. EXISTS: another process has
 * this rank. UNSUPPORTED: rank 0 is of another user. PEER: rank 0 has ended, not all ranks joined within the deadline,
 * of which the message names those that are missing, or a rank has another shard_ranks. */
gemini_status_t gmi_comm_shared_join(const gmi_comm_id_t *id, const gmi_comm_config_t *config, gmi_comm_t *comm_out);

/* Processes with a GPU each, over NCCL 2.18 or later, which is opened at run time: libnccl.so.2, as the dynamic linker
 * finds it. The collectives queue: they return once NCCL has queued the work on `stream`, a CUstream of the GPU's
 * primary context. buffer is device memory.
 *
 * One communicator is one of NCCL's, which runs its work in the order in which the host queued it, on whatever
 * streams. So all ranks call collectives and exchange() of one communicator in one order: here exchange() must not run
 * beside a collective. Make a communicator for each sort of work that is to run beside the others: gathers,
 * reductions, exchanges.
 *
 * Bytes are not checked: NCCL does not notice if ranks call different functions or sizes. They hang, until the
 * deadline, or compute nonsense.
 *
 * Reductions. By default sums are as fast as NCCL makes them: GMI_REDUCE_SUM and GMI_REDUCE_SUM_ROUNDED are both
 * ncclSum, in an order and with roundings that NCCL chooses by size and topology; two ranks give the one rounded sum.
 * With rank_order, results have the bits of gmi_reduce() on all ranks, except for the payload of a NaN: ranks send
 * each other their values, and a kernel adds them. GMI_REDUCE_MAX is always done so, as NCCL's maximum drops NaN.
 * UNSUPPORTED: the stream is being captured into a graph, of which this cannot become a part. In all ways buffer is a
 * multiple of a value's size.
 *
 * Waits. Queued work fails the communicator when it has run on the GPU for the deadline: poll() and the next
 * collective see that, so the caller calls poll() now and then. So does NCCL's own report of a failure, and the
 * deadline in any call. Each later call of this rank then returns PEER with the first message, and what its
 * collectives that had not ended leave in their buffers is undefined. The other ranks hear of it from NCCL, if at all,
 * or at their deadline. Replays of a graph into which a collective was captured are not watched. NCCL's communicator
 * is aborted by a thread of its own, which ends the kernels that wait. close() waits no longer than three deadlines.
 * Work that has not ended then keeps its memory. */
typedef struct gmi_comm_nccl_config {
  uint32_t rank, ranks;
  uint64_t deadline_ns;   /* as in gmi_comm_config_t; 0: 60 seconds */
  uint64_t scratch_bytes; /* device memory for values of other ranks; 0: 32 MiB with rank_order, else 2 MiB */
  int32_t device;         /* the GPU's ordinal */
  uint32_t most_blocks; /* thread blocks of a collective's kernel, at most; 0: as NCCL chooses. Not of an adopted one */
  bool rank_order;
  uint32_t named, named_of; /* rank and ranks for messages, of all replicas; named_of 0: rank and ranks */
  gmi_comm_listener_t listener;
} gmi_comm_nccl_config_t;

/* Makes the id of one communicator, by one rank; the caller brings it to the others. UNSUPPORTED: there is no NCCL, or
 * an older one. DEVICE: NCCL failed. */
gemini_status_t gmi_comm_nccl_id(gmi_comm_id_t *id_out);
/* Blocks until all ranks have joined.
 * INVALID: rank, ranks or device. UNSUPPORTED: there is no NCCL or no driver that can be used. OOM_*, DEVICE: memory or
 * the GPU. PEER: NCCL failed, or not all ranks joined within the deadline. */
gemini_status_t gmi_comm_nccl_join(const gmi_comm_id_t *id, const gmi_comm_nccl_config_t *config, gmi_comm_t *comm_out);
/* Uses the caller's ncclComm_t, which may be a blocking one: calls then block as NCCL's do. It is borrowed until
 * close(): nobody else may use it, and it is neither aborted nor destroyed here. So after a failure, work that hangs on
 * the GPU hangs until the caller aborts it. INVALID: it is not of this rank, number of ranks or device, or has failed.
 * Otherwise as gmi_comm_nccl_join(). */
gemini_status_t gmi_comm_nccl_adopt(void *nccl_comm, const gmi_comm_nccl_config_t *config, gmi_comm_t *comm_out);

/* A table of functions of the caller (gemini_comm_t), borrowed until close(). Checks what the functions return,
 * and calls none but abort() after the first failure. There is no deadline but the table's own. Reductions are
 * GMI_REDUCE_SUM; others are UNSUPPORTED.
 * The deadline of the configuration is ignored. With replicas the functions are called as gemini/group.h says.
 * INVALID: a value of the table is out of range, or one of the functions in needs is NULL; name is the table's, for
 * messages. */
enum {
  GMI_COMM_NEEDS_GATHERS = 1,   /* all_gather, broadcast */
  GMI_COMM_NEEDS_SUMS = 2,      /* reduce_scatter, all_reduce */
  GMI_COMM_NEEDS_EXCHANGES = 4, /* exchange */
  GMI_COMM_NEEDS_MEMORY = 8     /* register_memory, unregister_memory */
};
gemini_status_t gmi_comm_caller_open(const gemini_comm_t *table, uint32_t needs, const char *name,
                                     const gmi_comm_config_t *config, gmi_comm_listener_t listener,
                                     gmi_comm_t *comm_out);

/* One of replicas, made of two that queue: inside, of this replica's ranks, and across, of the ranks that have this
 * rank's place in their replicas, in the order of these. It owns both, also if it fails (OOM_SYSTEM). A failure of one
 * is not one of the other: the caller aborts. */
gemini_status_t gmi_comm_hybrid_open(gmi_comm_t inside, gmi_comm_t across, gmi_comm_t *comm_out);

#endif

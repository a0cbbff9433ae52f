/* libgemini: groups of processes that divide a model's bytes among them (ZeRO).
 * SPDX-License-Identifier: Apache-2.0
 *
 * Its words and conventions are those of gemini.h.
 *
 * Each process, a *rank*, has a manager and a device of its own. An arena that is created with a group
 * (gemini_arena_config_t.group) is *sharded*: each of its chunks is divided into equal *slices*, one for each rank, and
 * a rank keeps only its own slices in host memory and files. An acquire on the device gathers the whole chunk from all
 * ranks. Arenas that follow a sharded one are divided in the same way, element by element: gradients are added over all
 * ranks, and the states of the optimizer exist in slices only (Rajbhandari et al., "ZeRO", 2020, section 5).
 *
 * Hybrid sharding. With shard_ranks in its configuration, a group consists of *replicas* of so many ranks each, such
 * as the GPUs of a machine: replica 0 has ranks 0 to shard_ranks - 1, and so on. Chunks are divided among the ranks of
 * a replica, so each replica has the whole model, and what is gathered comes from its own ranks. All else is of all
 * ranks of all replicas: gradients are added over all of them, within each replica first (in the order of its ranks),
 * rounded to their type, and then over the replicas, in their order, and rounded again. Ranks that have the same slices
 * must write the same into them; gemini_norm() fails with GEMINI_ERR_PEER if replicas do not have the same bits.
 * "Ranks" without more are all ranks; with one replica there is no difference.
 *
 * What calls mean for sharded arenas:
 * - gemini_acquire() on the device gives the whole range. Parameters that ranks write there should be the same on all:
 *   each rank's own slices count. From the second iteration of a kind on, chunks are gathered ahead of the operators
 *   that use them. States cannot be acquired on the device.
 * - gemini_acquire() on the host gives a range within one slice of this rank; gemini_slice_next() finds these.
 * - A gradient arena names the type of its values (dtype of its configuration), which has the size of a parameter. On
 *   the device it has other addresses than its parameters. A rank that does not use a tensor writes no gradient: it is
 *   zero. Gradients are added over all ranks, in float (float64 in double) and in the order of ranks (over NCCL only
 *   with GEMINI_GROUP_RANK_ORDER, over the caller's functions as these do), when gemini_tensor_state_set() has made all
 *   gradients of a chunk GEMINI_STATE_READY_FOR_REDUCE (ZeRO 2 and 3), or when an update or gemini_norm() needs them.
 *   Ranks must make the same gradients ready at the same points of their programs, also those that they did not write
 *   (one that is GEMINI_STATE_FREE is set to GEMINI_STATE_HOLD first, which makes it zero).
 * - With reuse, the sums take the bytes of the parameters, and an update takes them. Until then a gradient that has
 *   been added cannot be written again.
 * - Without reuse, gradients of several micro-batches are accumulated. The sums have bytes of their own, in slices,
 *   and are what updates and norms get, and acquires on the host. The device has this rank's gradients that have not
 *   been added yet; once they have, they are zero there, and their tensors GEMINI_STATE_HOLD (one that is still
 *   READY_FOR_REDUCE need not, and cannot, be made so again). So an operator that adds to a gradient (READ_WRITE) is
 *   right in every stage, whether the earlier ones have been added or not. Each gradient of the arena is added once in
 *   a round, which READY_FOR_REDUCE of the first begins, and that of the last, an update or a norm ends; what is not
 *   ready by then is added as it is. Each round is added to the sums, in float, and rounded to the type; the first one
 *   after the arena was created or zeroed whole, or an update named it, replaces them. Sums stay as they are until
 *   then. Refused (GEMINI_ERR_STATE): writing a gradient again that this round has added already; overwriting (WRITE)
 *   one that is READY_FOR_REDUCE and has not been added; reading on the device what has been added, as it would give
 *   zeros. gemini_zero() zeroes sums and what has not been added. Gradients that ranks write outside operators and
 *   never make ready must be written by all ranks.
 * - gemini_update() takes all elements of sharded arenas; its spans are the elements of this rank's slices, and
 *   first_element counts in the whole arena.
 * - With GEMINI_UPDATE_PART it takes a part of them, for gradients without reuse: while the backward pass computes
 *   others. A part is whole chunks, of which gemini_stats() tells the bytes: first_element is a multiple of a chunk's
 *   elements, with buckets (gemini_group_config_t.bucket_bytes) of a bucket's; the first part ends at the arena's end,
 *   and each other one where the part before began. The part that begins at element 0 is the last one. A part adds the
 *   gradients of its chunks that have not been added, of the round that a READY_FOR_REDUCE has begun (GEMINI_ERR_STATE:
 *   none has, or the part was written again behind it). Ranks may cut the arena into other parts, and update them at
 *   other points of their programs. So, after a part and until the last one, what it has taken is not gathered, nor are
 *   gradients written there; and they are neither zeroed nor part of a checkpoint, the arenas do not grow, and no
 *   update without this flag comes (GEMINI_ERR_STATE).
 * - gemini_load() and gemini_store() transfer this rank's slices, from and to their places in the file: all ranks name
 *   the same file. gemini_zero() zeroes this rank's slices. gemini_norm() is that of all ranks, the same on all.
 * - Slices cannot be changed in these ways, or by an acquire on the host, while an operator is open or while parameters
 *   may stay gathered from one operator to the next (GEMINI_ERR_STATE), as other ranks may have gathered them. Those of
 *   gradients can, unless some of the range have not been added.
 * - gemini_hint(), gemini_move(), gemini_pin() and gemini_unpin() are for this rank's slices of a range, in whole
 *   chunks of slices: they go to the host, to files, or to the device of this rank, from where a gather takes them
 *   without a copy from the host. Pinned slices take their room from what can be gathered: pin before the first
 *   iteration. gemini_tier_bytes() says where the range's slices are. These calls gather nothing, and what was gathered
 *   stays, so each rank can make them or not, at any time. To have whole parameters on the device, acquire them; chunks
 *   are gathered ahead of use by themselves. Slices of gradients are sums; where they reuse bytes, they are the slices
 *   of the parameters.
 * - gemini_group_checkpoint() and gemini_group_resume() below save and load all arenas, over any number of ranks.
 * - Not supported (GEMINI_ERR_UNSUPPORTED): CUDA graphs, gradients that are zeroed with reuse, or loaded,
 *   gemini_arena_take() where gradients reuse the bytes, managers with checkpoint_name.
 *
 * All ranks must make the same calls for sharded arenas in the same order: the same tensors, operators, acquires and
 * updates, from one thread at a time. Calls that only read or write a rank's own slices may differ. A rank that makes
 * another call, ends or fails is noticed: the others get GEMINI_ERR_PEER, which names it, within the group's deadline.
 * After that their memory on the host stays readable, and their managers can be closed.
 *
 * Transports. A group over shared memory compares each call with those of the other ranks. NCCL does not offer that: a
 * rank that makes another call is noticed at the deadline only, if its call does not happen to fit, and messages name
 * this rank and what it waited for. On a GPU a failed group leaves what had been queued undone: nothing that was not
 * known to be done before is taken for done, updates on the host do not run with it, and calls that wait for the
 * device, or use sharded arenas there, return GEMINI_ERR_PEER until the manager is closed. A caller that waits for its
 * stream in another way finds it done, with bytes that nobody has written, and hears of it from its next call. */
#ifndef GEMINI_GROUP_H
#define GEMINI_GROUP_H

#include <gemini.h>

#ifdef __cplusplus
extern "C" {
#endif

/** @defgroup group Groups
 *  @{ */
enum { GEMINI_GROUP_RANKS = 1024, GEMINI_GROUP_ID_BYTES = 512 };

/** How the ranks of a group exchange bytes. */
enum {
  GEMINI_TRANSPORT_SHARED = 0, /* memory shared by processes of one machine and user; for the simulated device */
  GEMINI_TRANSPORT_NCCL = 1    /* NCCL 2.18 or later, opened at run time as libnccl.so.2, in the folder that GEMINI_NCCL
                                * in the environment names, if it is set; for CUDA devices */
};

/** Names a group that is being formed. One process makes it, and the caller brings it to the others. */
typedef struct gemini_group_id {
  uint8_t bytes[GEMINI_GROUP_ID_BYTES];
} gemini_group_id_t;

/** Makes the name of a new group. The calling process becomes rank 0.
 *  @param transport  GEMINI_TRANSPORT_*
 *  @param ranks   1 to GEMINI_GROUP_RANKS
 *  @param id_out  copied to the other ranks by the caller
 *  @retval GEMINI_ERR_INVALID  a value is out of range, or id_out is NULL
 *  @retval GEMINI_ERR_OOM_SYSTEM, GEMINI_ERR_UNSUPPORTED  there is no memory that processes can share, or no NCCL that
 *           can be used
 *  @retval GEMINI_ERR_DEVICE  NCCL failed
 *  What it takes is given back when rank 0 ends or has opened the group. Since: 0.1 */
GEMINI_API gemini_status_t gemini_group_id_make(uint32_t transport, uint32_t ranks, gemini_group_id_t *id_out)
    GEMINI_MUST_CHECK;

/** Functions of the caller's, for a communicator of its own (gemini_comm_t): a framework's process group, MPI, sockets.
 *
 *  user is that of the table. label says what the call is for, such as an operator and a chunk; it is never NULL, valid
 *  until return, and the same on all ranks. All ranks call the same functions with the same sizes in the same order.
 *
 *  buffer is memory of the manager's device: on a GPU it is device memory, on the simulated device host memory. It is
 *  the function's until the collective is done, and all results are in place. The address is a multiple of 256 bytes.
 *
 *  stream: with GEMINI_COMM_QUEUES, a CUstream (cudaStream_t) of the manager's GPU. The function queues its work there,
 *  or so that the stream waits for it, and returns without waiting for other ranks' calls; what is queued on the stream
 *  next finds the results. Without, it is NULL, and the function returns when the results are there.
 *
 *  What they return: GEMINI_OK; GEMINI_ERR_PEER if another rank has ended, failed or did not come in time, best after
 *  gemini_error_set() on the same thread with a message that names the rank. Any other status becomes GEMINI_ERR_PEER,
 *  with the function's name and status in the message. After the first failure of any function of a table, no function
 *  of it is called but abort(), and every call of the library that needs it fails with the first message. Functions
 *  must not throw, call functions of the manager, or fork.
 *
 *  Replicas: with shard_ranks, all_gather() and broadcast() are called for the ranks of this replica, and root and the
 *  slices of a buffer are counted within it. reduce_scatter() and all_reduce() add over all ranks of all replicas, with
 *  the same bits in each replica. exchange() is among all ranks.
 *
 *  Waits: the library cannot end a function that waits. So functions end their waits themselves when another rank is
 *  gone, or after a time that the caller finds acceptable. */
/** buffer holds a slice of slice_bytes bytes for each rank, in the order of ranks; this rank's own slice becomes the
 *  same slice on all ranks. */
typedef gemini_status_t (*gemini_comm_all_gather_fn)(void *user, void *buffer, uint64_t slice_bytes, void *stream,
                                                     const char *label);
/** buffer, of size_bytes bytes, becomes that of rank root on all ranks. */
typedef gemini_status_t (*gemini_comm_broadcast_fn)(void *user, void *buffer, uint64_t size_bytes, uint32_t root,
                                                    void *stream, const char *label);
/** buffer holds a slice of slice_count values of dtype (GEMINI_DTYPE_*) for each rank; this rank's own slice becomes
 *  its sum over all ranks. The other slices are undefined afterwards. The function chooses the order of additions and
 *  the type in which it adds; runs that are to compute the same bits need a fixed order, such as that of ranks. */
typedef gemini_status_t (*gemini_comm_reduce_scatter_fn)(void *user, void *buffer, uint64_t slice_count, uint32_t dtype,
                                                         void *stream, const char *label);
/** buffer, of count values, becomes the sum over all ranks, with the same bits on all ranks. */
typedef gemini_status_t (*gemini_comm_all_reduce_fn)(void *user, void *buffer, uint64_t count, uint32_t dtype,
                                                     void *stream, const char *label);
/** Brings size_bytes bytes of each rank to all ranks, in host memory. Always blocks. mine is borrowed until return;
 *  all_out gets ranks * size_bytes bytes in the order of ranks. Ranks meet in it also if size_bytes is 0. */
typedef gemini_status_t (*gemini_comm_exchange_fn)(void *user, const void *mine, uint64_t size_bytes, void *all_out,
                                                   const char *label);
/** The failure that the next function would return, or that work already queued has met; GEMINI_OK: none is known. It
 *  must not wait. */
typedef gemini_status_t (*gemini_comm_poll_fn)(void *user);
/** Makes functions and queued work of all ranks end, with a failure. why says why; it is valid until return. Called at
 *  most once, after the first failure of this rank; also while another thread is in a function of the table. It must
 *  not wait. */
typedef void (*gemini_comm_abort_fn)(void *user, const char *why);

/** Optional, for groups with GEMINI_GROUP_REGISTER; called of the first table only. Gathers, and the broadcasts of what
 *  they leave over, will often run within these size_bytes bytes of the manager's device, at these addresses, behind
 *  which the memory stays the same until unregister_memory(). Each rank calls it for itself, by the thread that calls
 *  collectives or inside a call of the manager; collectives in other memory may be under way. A failure fails nothing:
 *  gathers then run at other addresses.
 *  @param handle_out  what unregister_memory() gets; may stay as it is */
typedef gemini_status_t (*gemini_comm_register_memory_fn)(void *user, void *memory, uint64_t size_bytes,
                                                          void **handle_out);
/** The memory will be freed, or nobody will gather into it any more; no collective of it is under way. It is not called
 *  after a failure of a function of the table. */
typedef void (*gemini_comm_unregister_memory_fn)(void *user, void *handle);

enum {
  GEMINI_COMM_QUEUES = 1 /* collectives queue on the stream and return; needs a device with native streams */
};

/** A table of functions. A group has three: for gathers (all_gather and broadcast are needed), for sums (reduce_scatter
 *  and all_reduce) and for exchanges (exchange). What else a table has is not called, except poll and abort, which may
 *  be NULL. Without poll, a failure is known when a function returns it.
 *
 *  Threads. The collectives of one table are called by one thread at a time, in the order of the manager's calls. With
 *  GEMINI_COMM_QUEUES that is the thread that is inside a call of the manager, which keeps the manager's lock
 *  meanwhile; without, a thread of the library's for each table, and the manager's device must be able to wait for it,
 *  as the simulated device does. exchange() is called by the thread that is inside a call of the manager, or by a
 *  thread of the library's that compares the ranks' iterations, one at a time. The three tables are used beside each
 *  other: one table may be given several times only if its functions may run at the same time, in any order among
 *  ranks. poll() and abort() are called by any thread, at any time. */
typedef struct gemini_comm {
  uint32_t struct_size; /* bytes; set by GEMINI_COMM_INIT */
  uint32_t flags;       /* GEMINI_COMM_* */
  void *user;           /* the first argument of all functions */
  gemini_comm_all_gather_fn all_gather;
  gemini_comm_broadcast_fn broadcast;
  gemini_comm_reduce_scatter_fn reduce_scatter;
  gemini_comm_all_reduce_fn all_reduce;
  gemini_comm_exchange_fn exchange;
  gemini_comm_poll_fn poll;
  gemini_comm_abort_fn abort;
  gemini_comm_register_memory_fn register_memory; /* these two: called, and not NULL, with GEMINI_GROUP_REGISTER only */
  gemini_comm_unregister_memory_fn unregister_memory;
} gemini_comm_t;
#define GEMINI_COMM_INIT { sizeof(gemini_comm_t), 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL }

enum {
  GEMINI_GROUP_RANK_ORDER = 1, /* over NCCL: adds in float and in the order of ranks, and rounds once (fp32 sums), with
                                * the same bits in each run and on any number of machines; slower. Over shared memory
                                * that is always so. Without, NCCL adds as fast as it goes: in the type of the
                                * gradients (bf16 sums of bf16), in an order of its own */
  GEMINI_GROUP_REGISTER = 2    /* over NCCL 2.19 and later, and functions of the caller: the frames into which chunks
                                * are gathered are registered, which NCCL may copy to faster, by up to a fifth. Each
                                * takes addresses of its own, no memory, and time at its first gather. No bit depends
                                * on it */
};
enum {
  GEMINI_GROUP_COMMS = 3,       /* communicators of a group: gathers, sums, exchanges, in this order */
  GEMINI_GROUP_HYBRID_COMMS = 4 /* of NCCL, of a group of several replicas: these, and sums across replicas */
};

/** Exactly one of id, nccl_comms and comms is set. */
typedef struct gemini_group_config {
  uint32_t struct_size; /* bytes; set by GEMINI_GROUP_CONFIG_INIT */
  uint32_t flags;       /* GEMINI_GROUP_* */
  uint32_t rank;        /* of this process, below ranks; each rank is one process */
  uint32_t ranks;
  const gemini_group_id_t *id; /* of gemini_group_id_make(), the same on all ranks; borrowed until return */
  uint64_t deadline_ns;        /* longest wait for another rank that makes no progress; 0 = 10 seconds, over NCCL 60.
                                * With comms 0: their functions end their waits themselves */
  /* The caller's own communicators of NCCL: an array of GEMINI_GROUP_COMMS different ncclComm_t, each with this rank,
   * number of ranks and GPU. With several replicas there are GEMINI_GROUP_HYBRID_COMMS: gathers and sums are among the
   * ranks of this replica, exchanges among all; the last one is among the ranks that have this one's place in their
   * replicas, in the order of replicas. The array is borrowed until return; the communicators until
   * gemini_group_close() or gemini_manager_close() returns: nobody else uses them meanwhile, and they are neither
   * aborted nor destroyed. After a failure, what hangs on the GPU hangs until the caller aborts them, and so do these
   * two calls. */
  void *const *nccl_comms;
  /* The caller's own functions: an array of GEMINI_GROUP_COMMS pointers to tables. Array and tables are borrowed until
   * return; functions and user until gemini_group_close() or gemini_manager_close() returns. */
  const gemini_comm_t *const *comms;
  uint32_t shard_ranks; /* ranks of a replica; divides ranks, the same on all ranks; 0: there is one replica, of all */
  uint32_t reserved;    /* 0 */
  /* Gradients of neighbouring chunks are added together, so many bytes of them: 2 to 16 chunks, a bucket, in one call
   * over NCCL, which takes the calling thread and the GPU less time. A bucket is added when all of its tensors are
   * READY_FOR_REDUCE, and stays on the device until then. Less than two chunks, or 0: each chunk alone. No bit of a sum
   * depends on it over shared memory or in the order of ranks. The same on all ranks: they notice a difference at the
   * end of an iteration, over NCCL perhaps only at the deadline. gemini_group_stats() says how many chunks it is. */
  uint64_t bucket_bytes;
} gemini_group_config_t;
#define GEMINI_GROUP_CONFIG_INIT { sizeof(gemini_group_config_t), 0, 0, 0, NULL, 0, NULL, NULL, 0, 0, 0 }

/** Joins a group. Blocks until all ranks have; with nccl_comms it does not wait for others. With comms it calls the
 *  exchange() of the third table once, with 8 bytes.
 *  @param group_out  transferred to the caller; end with gemini_group_close() or gemini_manager_close()
 *  @retval GEMINI_ERR_INVALID  a value is out of range; or id, rank and ranks are not of one group, a communicator of
 *           nccl_comms is not of this rank, number of ranks or GPU, or a table lacks a function
 *  @retval GEMINI_ERR_EXISTS  another process has this rank
 *  @retval GEMINI_ERR_UNSUPPORTED  the transport does not serve the manager's device, there is no NCCL that can be
 *           used, or rank 0 is of another user
 *  @retval GEMINI_ERR_OOM_DEVICE, GEMINI_ERR_OOM_HOST, GEMINI_ERR_DEVICE  over NCCL: memory, or the GPU
 *  @retval GEMINI_ERR_PEER  rank 0 has ended, or ranks are missing at the deadline, which the message names; ranks have
 *           other shard_ranks (over NCCL, where one has 0, that is only noticed at the deadline); NCCL or the caller's
 *           function failed
 *  A group over NCCL takes 12 MiB of device memory beside the manager's budget (with GEMINI_GROUP_RANK_ORDER 42 MiB), 6
 *  MiB of page-locked host memory, and what NCCL takes; of several replicas 16 MiB (76 MiB), and 8 MiB. A manager has
 *  at most 16 groups. Where the call fails on one rank that has begun to join by an id, the group has failed for all:
 *  the others' calls return GEMINI_ERR_PEER, over shared memory with this rank's reason. Since: 0.1 */
GEMINI_API gemini_status_t gemini_group_open(gemini_manager_t mgr, const gemini_group_config_t *config,
                                             gemini_group_t *group_out) GEMINI_MUST_CHECK;

/** Leaves a group. The other ranks' later calls that need this rank fail. NULL is accepted.
 *  @retval GEMINI_ERR_BUSY  an arena of the manager is sharded over the group
 *  Blocks until queued work of the group is done. Since: 0.1 */
GEMINI_API gemini_status_t gemini_group_close(gemini_manager_t mgr, gemini_group_t group);

/** Brings a few bytes of each rank to all ranks. All ranks must call it, with the same size. Blocks until they have.
 *  @param mine     size_bytes bytes; borrowed until return
 *  @param all_out  ranks * size_bytes bytes, in the order of ranks
 *  @retval GEMINI_ERR_INVALID  mine or all_out is NULL and size_bytes is not 0, or ranks * size_bytes is 2^63 or more
 *  @retval GEMINI_ERR_PEER  another rank did not, or has failed before
 *  One thread at a time. Over shared memory other threads may use the manager meanwhile. Over NCCL and the caller's
 *  functions, gemini_norm() and the end of an iteration use the same communicator: if another thread's exchange is
 *  under way, they return GEMINI_ERR_BUSY. Since: 0.1 */
GEMINI_API gemini_status_t gemini_group_exchange(gemini_manager_t mgr, gemini_group_t group, const void *mine,
                                                 uint64_t size_bytes, void *all_out) GEMINI_MUST_CHECK;

typedef struct gemini_group_stats_s {
  uint32_t struct_size; /* bytes; set by GEMINI_GROUP_STATS_INIT; on return, bytes filled */
  uint32_t rank;
  uint32_t ranks;
  uint32_t shard_ranks;     /* of a replica, among which chunks are divided; ranks if there is one */
  uint64_t gathered_chunks; /* gathered so far */
  uint64_t gathered_bytes;  /* of these, received from other ranks */
  uint64_t reduced_chunks;  /* gradient chunks added so far, in each round anew */
  uint64_t fetched_bytes;   /* own slices, brought to the device for a gather */
  uint64_t stored_bytes;    /* own slices, taken from the device after a sum or a write */
  uint64_t reduced_bytes;   /* of the gradient chunks added, sent to other ranks of the replica */
  /* What operators gather and make ready in each iteration, by the plan that was followed last, and what an iteration
   * adds to the figures above if it follows the plan; 0: no plan. */
  uint64_t planned_gathered_bytes, planned_reduced_bytes, planned_fetched_bytes;
  /* The part of gemini_stats_t.stall_ns in which operators waited for gathers, each with the copy of the own slice
   * before it, and that in which they waited behind a sum of gradients, such as for the frame that it gives back. What
   * a sum delays otherwise, such as an update, is not in it. */
  uint64_t gather_wait_ns, sum_wait_ns;
  uint32_t bucket_chunks; /* chunks whose gradients are added together, at least 1; 0: their size is not chosen yet */
  /* Iterations that began with the gathers of one plan and came to differ from it: an evaluation that was not expected,
   * say, begins as a step. They do not move the planned bytes. */
  uint32_t plan_changes;
} gemini_group_stats_t;
#define GEMINI_GROUP_STATS_INIT { sizeof(gemini_group_stats_t), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
/** Copies a group's statistics.
 *  @param stats_out  allocated by the caller, struct_size set; borrowed until return
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_group_stats(gemini_manager_t mgr, gemini_group_t group,
                                              gemini_group_stats_t *stats_out) GEMINI_MUST_CHECK;

/** Finds the next part of a range that this rank keeps: the caller can acquire it on the host. Of an arena that is not
 *  sharded every rank keeps all, in one part.
 *  @param range       object and range; tier and mode are ignored; borrowed until return
 *  @param from_bytes  where to look from, in the object, as offset_bytes of range; where range is named by its address,
 *                     bytes from the beginning of the arena, as offset_out
 *  @param offset_out  of the part in the object
 *  @param size_out    bytes; 0: there is no further part, and *offset_out is the end of the range
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_slice_next(gemini_manager_t mgr, const gemini_access_t *range, uint64_t from_bytes,
                                             uint64_t *offset_out, uint64_t *size_out) GEMINI_MUST_CHECK;

/** Saves what all arenas hold, and the states of their tensors, for gemini_group_resume() of any number of ranks. All
 *  ranks of the group call it, at the same point of their programs. Each writes its slices; of an arena that is not
 *  sharded, each writes a part, and ranks must hold the same bytes. When all have, rank 0 makes it the checkpoint of
 *  this name by one rename: whatever is killed at whatever time, there is the previous checkpoint or this one, whole.
 *  Then the files of the previous one are removed; the disks need room for both until then. What an attempt that was
 *  killed has written is removed then too, or by the checkpoint after. Everything is written each time, zeros excepted.
 *  It needs no file tier, and no checkpoint_name.
 *  Gradients in an arena of their own (GEMINI_KIND_GRAD) that is not sharded are saved as they are, also after an
 *  update. Ranks that shard that arena cannot add to them, and gemini_group_resume() refuses them there, not this call:
 *  to go on with such ranks, zero the arena (gemini_zero()) before the checkpoint.
 *  Two processes must not make checkpoints of one name at the same time: NAME.lock keeps them from it, but on a file
 *  system without locks, or whose locks do not reach other machines, the one that ends later fails with
 *  GEMINI_ERR_BUSY, and if both end within the same moment, one of the checkpoints is lost, with status OK. Where the
 *  system says that it has no locks, each call logs a warning.
 *  @param group  over which all sharded arenas of the manager are; NULL: none is sharded, and this process is all ranks
 *  @param directories  one or several, separated by ':', as file_dir of gemini_config_t. Ranks of several machines need
 *           directories that all of them share. Borrowed until return
 *  @param name   1 to 160 bytes without '/', the same on all ranks. Files are NAME.ranks, NAME.lock and, of each rank,
 *           NAME.NUMBER-TOKEN.RANK.index and .chunks. Borrowed until return
 *  If it fails on one rank, it fails on all with that rank's status and words, "rank 2: ...", and the previous
 *  checkpoint stays. But for GEMINI_ERR_PEER, which says that a rank has ended or did not come: if that was in the last
 *  steps, the new checkpoint may be there.
 *  @retval GEMINI_ERR_INVALID  a value is out of range; or a rank's arenas, tensors, name, chunk_bytes, or bytes of an
 *           arena that is not sharded, are others than those of rank 0: the message names the rank
 *  @retval GEMINI_ERR_STATE  gradients have been written that no update, or without reuse no norm or update, has taken
 *  @retval GEMINI_ERR_BUSY  a range is acquired for writing; or another process makes a checkpoint of this name, or has
 *           made one meanwhile
 *  @retval GEMINI_ERR_EXISTS  NAME.index is there, a checkpoint of one process (gemini_checkpoint())
 *  @retval GEMINI_ERR_UNSUPPORTED  an arena is sharded over another group
 *  Of several replicas the first one writes; the others compare checksums of their slices with its.
 *  @retval GEMINI_ERR_OOM_FILE, GEMINI_ERR_IO, GEMINI_ERR_FORMAT  a file, which the message names, could not be written
 *           or read. IO also if the rename could not be made durable: then a loss of power may bring back the previous
 *           checkpoint. And if the rename failed, and NAME.ranks could not be read afterwards: then either is there
 *  @retval GEMINI_ERR_OOM_HOST  there is no room on the host for a chunk that has to pass through it
 *  Blocks. Other threads' calls that need the manager's lock wait. Ranks that write for different times do not run into
 *  the deadline, but one that needs longer for the sync at the end does. Since: 0.1 */
GEMINI_API gemini_status_t gemini_group_checkpoint(gemini_manager_t mgr, gemini_group_t group, const char *directories,
                                                   const char *name) GEMINI_MUST_CHECK;

/** Reads a checkpoint of gemini_group_checkpoint(), or of gemini_checkpoint() by one process, which may have been made
 *  by any number of ranks, with any chunk_bytes. All ranks of the group call it. Each reads its slices, and all of
 *  arenas that are not sharded. The caller must have made the same arenas and tensors, by name, kind, size and offset,
 *  sharded or not; they must hold no bytes yet.
 *  @param group  with which the ranks agree; arenas may be sharded over others. NULL: none is sharded, and this process
 *           is alone
 *  @param directories, name  as for gemini_group_checkpoint(), or file_dir and checkpoint_name (of up to 200 bytes)
 *  If it fails on one rank, it fails on all, and nothing has changed.
 *  @retval GEMINI_ERR_NOT_FOUND  there is no checkpoint
 *  @retval GEMINI_ERR_FORMAT  it is of other arenas or tensors, or a file is missing or damaged: the message names the
 *           file and what differs. Or NAME.ranks and NAME.index are both there; or gemini_checkpoint() has replaced
 *           the checkpoint while it was read: try again. Or it has gradients, not sums of ranks, of an arena that is
 *           sharded here and keeps sums: they had to be zeroed before the checkpoint
 *  @retval GEMINI_ERR_STATE  an arena holds bytes, is acquired or pinned, or an update of it is pending
 *  @retval GEMINI_ERR_INVALID  a value is out of range, or a rank's arenas, name, chunk_bytes or checkpoint are others
 *  @retval GEMINI_ERR_UNSUPPORTED  an arena is sharded, and group is NULL
 *  @retval GEMINI_ERR_OOM_HOST, GEMINI_ERR_OOM_FILE, GEMINI_ERR_IO, GEMINI_ERR_PEER  as elsewhere
 *  Blocks. Since: 0.1 */
GEMINI_API gemini_status_t gemini_group_resume(gemini_manager_t mgr, gemini_group_t group, const char *directories,
                                               const char *name) GEMINI_MUST_CHECK;
/** @} */

#ifdef __cplusplus
}
#endif
#endif

/* libgemini: memory management for models larger than the GPU.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A training step (examples/training_step.c runs it). TRY() leaves the function with the first failure; forward() and
 * backward() stand for kernels; sgd() updates the elements that it is given.
 *
 *     // A manager owns one device and a budget for each tier. The device holds a third of this model.
 *     gemini_config_t config = GEMINI_CONFIG_INIT;
 *     config.device = GEMINI_DEVICE_SIMULATED;
 *     config.device_bytes = 2 << 20;
 *     config.host_bytes = 64 << 20;
 *     gemini_manager_t mgr;
 *     TRY(gemini_manager_open(&config, &mgr));
 *
 *     // Three arenas of one layout: each tensor of the first has a counterpart in the others.
 *     gemini_arena_t params, grads, masters;
 *     gemini_arena_config_t arena = GEMINI_ARENA_CONFIG_INIT;
 *     arena.element_bytes = sizeof(float);
 *     arena.kind = GEMINI_KIND_PARAM;
 *     TRY(gemini_arena_create(mgr, &arena, &params));
 *     arena.like = params;
 *     arena.kind = GEMINI_KIND_GRAD;
 *     TRY(gemini_arena_create(mgr, &arena, &grads));
 *     arena.kind = GEMINI_KIND_MASTER;
 *     TRY(gemini_arena_create(mgr, &arena, &masters));
 *     gemini_tensor_t weight[LAYERS], grad[LAYERS];
 *     char name[32];
 *     for (int i = 0; i < LAYERS; i++) {
 *       snprintf(name, sizeof name, "layer %d", i);
 *       TRY(gemini_tensor_register(mgr, params, name, ELEMENTS * sizeof(float), GEMINI_OFFSET_NEXT, &weight[i]));
 *       TRY(gemini_tensor_counterpart(mgr, weight[i], grads, &grad[i]));
 *     }
 *     gemini_stream_t stream;
 *     TRY(gemini_stream_create(mgr, &stream));
 *
 *     // The first iteration is recorded; the next ones run under a plan made from the record.
 *     for (int step = 0; step < STEPS; step++) {
 *       TRY(gemini_iteration_begin(mgr));
 *       TRY(gemini_phase_set(mgr, GEMINI_PHASE_FORWARD));
 *       for (int i = 0; i < LAYERS; i++) {
 *         gemini_access_t use = gemini_tensor_access(weight[i], 0, 0, GEMINI_READ, GEMINI_TIER_DEVICE); // all of it
 *         snprintf(name, sizeof name, "forward %d", i);
 *         TRY(gemini_op_begin(mgr, name, stream));
 *         TRY(gemini_acquire(mgr, &use, 1, stream));
 *         TRY(gemini_stream_call(mgr, stream, forward, use.ptr)); // or a kernel
 *         TRY(gemini_release(mgr, &use, 1, stream));
 *         TRY(gemini_op_end(mgr));
 *       }
 *       TRY(gemini_phase_set(mgr, GEMINI_PHASE_BACKWARD));
 *       for (int i = LAYERS; i-- > 0;) {
 *         gemini_access_t uses[2] = { gemini_tensor_access(weight[i], 0, 0, GEMINI_READ, GEMINI_TIER_DEVICE),
 *                                     gemini_tensor_access(grad[i], 0, 0, GEMINI_WRITE, GEMINI_TIER_DEVICE) };
 *         snprintf(name, sizeof name, "backward %d", i);
 *         TRY(gemini_op_begin(mgr, name, stream));
 *         TRY(gemini_acquire(mgr, uses, 2, stream));
 *         TRY(gemini_stream_call(mgr, stream, backward, uses[1].ptr));
 *         TRY(gemini_release(mgr, uses, 2, stream));
 *         TRY(gemini_op_end(mgr));
 *       }
 *       // sgd() is called once for each part of the three arenas. If the part is on the host, a worker thread
 *       // calls it and it computes; if the part is on the device, it only queues work.
 *       TRY(gemini_phase_set(mgr, GEMINI_PHASE_UPDATE));
 *       const gemini_arena_t arenas[] = { params, grads, masters };
 *       const uint32_t modes[] = { GEMINI_WRITE, GEMINI_READ, GEMINI_READ_WRITE };
 *       gemini_update_t update = GEMINI_UPDATE_INIT;
 *       update.arenas = arenas;
 *       update.modes = modes;
 *       update.arena_count = 3;
 *       update.stream = stream;
 *       update.fn = sgd;
 *       update.user = &mgr;
 *       TRY(gemini_update(mgr, &update));
 *       TRY(gemini_iteration_end(mgr));
 *     }
 *
 *     // The caller's own thread reads a weight on the host.
 *     gemini_access_t last = gemini_tensor_access(weight[0], 0, 0, GEMINI_READ, GEMINI_TIER_HOST);
 *     TRY(gemini_acquire(mgr, &last, 1, GEMINI_STREAM_CALLER));
 *     *trained_out = *(const float *)last.ptr;
 *     TRY(gemini_release(mgr, &last, 1, GEMINI_STREAM_CALLER));
 *
 *     gemini_stats_t stats = GEMINI_STATS_INIT;
 *     TRY(gemini_stats(mgr, &stats));
 *     printf("%d of %d steps ran under a plan\n", (int)stats.planned_iterations, (int)stats.iterations);
 *     return gemini_manager_close(mgr);
 * end of the training step
 *
 * Words:
 * - A *tier* is where bytes can live: the device, host memory, or files.
 * - An *arena* is a range of device addresses for tensors of one kind. A *chunk* is one of the equal parts that an
 *   arena is cut into; it is what moves between tiers. *Resident* means on the device.
 * - To *acquire* a range is to bring its chunks to a tier and keep them there; to *release* it ends that.
 * - An *iteration* is a training step, a *phase* is its forward, backward or update part, and an *operator* is one
 *   unit of work in it, with a name and a stream.
 * - The *plan* says which chunks to fetch and to evict before which operator. It is made from the record of an
 *   iteration. A chunk that the plan has not fetched is fetched *on demand*, by the acquire itself.
 *
 * Pages named docs/... are part of the source, and of an installation, in share/doc/gemini.
 *
 * Conventions, valid for every declaration of this library:
 * - A function that can fail returns gemini_status_t: GEMINI_OK or a negative GEMINI_ERR_*. A failed call has changed
 *   nothing and leaves its results, named *_out, untouched. gemini_last_error() tells the thread what went wrong.
 * - A handle is a 64-bit value in the form of a pointer. Each kind of object has a pointer type of its own, so that
 *   compilers refuse a handle of another kind. The pointer is never followed; NULL is no handle. The library refuses a
 *   handle of another kind, of another manager, or of a destroyed object with GEMINI_ERR_HANDLE.
 * - Parameters come in this order: the manager or topology, the object, inputs, results. The size of a buffer comes
 *   before the buffer, and how much of it was filled comes after. A buffer for text has room for size_bytes; NULL with
 *   size_bytes 0 asks for the length. A function that destroys an object also takes the manager that the object is of.
 * - Sizes and offsets are bytes unless the name says elements. Times are nanoseconds.
 * - A call that needs room in a tier can return GEMINI_ERR_OOM_DEVICE, GEMINI_ERR_OOM_HOST or GEMINI_ERR_OOM_FILE. The
 *   full tier may be below the one that needs room, as chunks that leave one tier go to the next: for example, an
 *   acquire on the device can fail because the host is full and nothing can be evicted to it.
 * - Any thread may call any function unless its comment says otherwise. Functions that take a stream never wait for the
 *   work queued on it, unless the stream is GEMINI_STREAM_CALLER or the comment says "blocks".
 * - After fork(), the child has none of its parent's managers. Calls with their handles, closing included, return
 *   GEMINI_ERR_HANDLE, and the message names the parent. Their memory is not there: touching it faults, until the child
 *   maps something else at the same addresses. Their files are the parent's alone. The child can open managers of its
 *   own, but no CUDA ones if the parent has used CUDA, whose driver does not work in forked processes. Topologies stay
 *   usable in both.
 * - Structs that the caller allocates begin with struct_size; use the GEMINI_*_INIT macros. A field that is 0 means the
 *   default. Later versions append fields. The library accepts every size from that of the first release up to 4,096
 *   bytes. Of a struct that it reads, it refuses bytes behind the fields that it knows if they are not 0
 *   (GEMINI_ERR_INVALID). Of a struct for results, it fills the fields that both sides know and sets struct_size to the
 *   bytes filled. All structs of an array have the same size.
 */
#ifndef GEMINI_H
#define GEMINI_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define GEMINI_API __attribute__((visibility("default")))
#define GEMINI_MUST_CHECK __attribute__((warn_unused_result))
#else
#define GEMINI_API
#define GEMINI_MUST_CHECK
#endif

#if UINTPTR_MAX != UINT64_MAX
#error "libgemini needs 64-bit pointers: its handles have 64 bits"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** @defgroup version Version
 *  The only place where the version is written: the build reads it here.
 *  @{ */
#define GEMINI_VERSION_MAJOR 0
#define GEMINI_VERSION_MINOR 1
#define GEMINI_VERSION_PATCH 0
#define GEMINI_VERSION_STRING "0.1.0"

/** Returns the version of the loaded library as "MAJOR.MINOR.PATCH", in static storage. Since: 0.1 */
GEMINI_API const char *gemini_version(void);
/** @} */

/** @defgroup errors Errors
 *  @{ */
typedef int32_t gemini_status_t;
enum {
  GEMINI_OK = 0,
  GEMINI_ERR_INVALID = -1,      /* an argument is out of range; the message names value and limit */
  GEMINI_ERR_HANDLE = -2,       /* a handle is unknown, destroyed, of another kind or of another manager */
  GEMINI_ERR_STATE = -3,        /* the call is out of order, or an illegal tensor-state transition */
  GEMINI_ERR_BUSY = -4,         /* the object is acquired, pinned or otherwise in use */
  GEMINI_ERR_OOM_DEVICE = -5,   /* the device budget is exhausted and nothing more can be evicted */
  GEMINI_ERR_OOM_HOST = -6,     /* the host budget is exhausted and nothing can move to files */
  GEMINI_ERR_OOM_FILE = -7,     /* the file budget, or the disk, is exhausted */
  GEMINI_ERR_OOM_SYSTEM = -8,   /* the process could not get memory for the library's own records */
  GEMINI_ERR_IO = -9,           /* reading or writing a file failed; native_code is errno */
  GEMINI_ERR_FORMAT = -10,      /* a file's content is not as expected; the message names the line or offset */
  GEMINI_ERR_NOT_FOUND = -11,   /* no object has this name */
  GEMINI_ERR_EXISTS = -12,      /* the name is taken */
  GEMINI_ERR_UNSUPPORTED = -13, /* this build or device cannot do that */
  GEMINI_ERR_DEVICE = -14,      /* the device reported an error; native_code is its code */
  GEMINI_ERR_PENDING = -15,     /* the call was accepted and its work is not done yet; the message says why */
  GEMINI_ERR_PEER = -16 /* another process of a group ended, failed or made another call; the message names it */
};

/** Returns a status in words, in static storage; never NULL. Since: 0.1 */
GEMINI_API const char *gemini_status_string(gemini_status_t status);

typedef struct gemini_error_info {
  uint32_t struct_size;   /* bytes; set by GEMINI_ERROR_INFO_INIT */
  gemini_status_t status; /* what this thread's last failed call returned */
  int64_t native_code;    /* errno or the device's code; 0 when there is none */
  char operation[64];     /* the public function that failed */
  char message[440];      /* what happened: which value, which limit */
} gemini_error_info_t;
#define GEMINI_ERROR_INFO_INIT { sizeof(gemini_error_info_t), 0, 0, "", "" }

/** Copies the record of this thread's last failed call. A call that succeeds leaves the record as it is.
 *  @param info_out  allocated by the caller, struct_size set
 *  @retval GEMINI_OK  the record is copied
 *  @retval GEMINI_ERR_INVALID  info_out is NULL, or its struct_size is out of range
 *  Threads: any; each thread has its own record. Since: 0.1 */
GEMINI_API gemini_status_t gemini_last_error(gemini_error_info_t *info_out);
/** Makes info the record of this thread's last failed call. It is for libraries built on this one, such as
 *  libgemini_update: their callers then find every error text in one place. operation and message are cut and ended
 *  with a null byte where they have none.
 *  @param info  status negative, struct_size set; copied
 *  @retval GEMINI_OK  info is the record
 *  @retval GEMINI_ERR_INVALID  info is NULL, its struct_size is out of range, or its status is no error; the record is
 *           then of this call
 *  Threads: any; each thread has its own record. Since: 0.1 */
GEMINI_API gemini_status_t gemini_error_set(const gemini_error_info_t *info);
/** Returns the record of this thread's last failed call as one line of text: the function, the status in words, the
 *  message and, where there is one, the native code. It tells of libgemini_update's failures, too, and never fails:
 *
 *      if (gemini_acquire(mgr, &use, 1, stream)) fprintf(stderr, "%s\n", gemini_error_text());
 *
 *  @return never NULL; "no call has failed" before the first failure. The text belongs to the thread and is valid until
 *          the thread's next call of this function
 *  Threads: any; each thread has its own record. Since: 0.1 */
GEMINI_API const char *gemini_error_text(void);
/** @} */

/** @defgroup manager Managers
 *  @{ */
typedef struct gemini_manager_s *gemini_manager_t;
typedef struct gemini_arena_s *gemini_arena_t;
typedef struct gemini_tensor_s *gemini_tensor_t;
typedef struct gemini_stream_s *gemini_stream_t;
typedef struct gemini_group_s *gemini_group_t; /* gemini/group.h */

/** Stands for the calling thread in place of a stream: the call does the work itself, at once. An acquire on it blocks
 *  until the bytes are there. */
#define GEMINI_STREAM_CALLER ((gemini_stream_t)0)

/** An index that names nothing. */
#define GEMINI_INDEX_NONE UINT32_MAX

/** Later versions may have more tiers; GEMINI_TIER_COUNT is how many this one has. */
enum { GEMINI_TIER_DEVICE = 0, GEMINI_TIER_HOST = 1, GEMINI_TIER_FILE = 2, GEMINI_TIER_COUNT = 3 };
enum {
  GEMINI_PLACEMENT_AUTO = 0,  /* chosen by predicted step time */
  GEMINI_PLACEMENT_CUDA = 1,  /* as much as fits stays on the device; the rest moves */
  GEMINI_PLACEMENT_CPU = 2,   /* all chunks live below the device and are on it for one operator */
  GEMINI_PLACEMENT_STATIC = 3 /* the given fractions stay on the device; the rest as under CPU */
};
/** Which chunk of operators chosen at run time leaves first (gemini/chosen.h); docs/policy.md ("The cache"). */
enum {
  GEMINI_CACHE_LRU = 0,        /* the one used longest ago */
  GEMINI_CACHE_FREQUENT = 1,   /* the one used in the fewest passes, of which recent ones count more */
  GEMINI_CACHE_LEAST_STALE = 2 /* the one whose layer was passed last, as it comes again last */
};
enum { GEMINI_DEVICE_SIMULATED = 0, GEMINI_DEVICE_CUDA = 1 };
enum {
  GEMINI_FILE_ENGINE_AUTO = 0,   /* io_uring, or threads if the system forbids it */
  GEMINI_FILE_ENGINE_URING = 1,  /* io_uring; opening fails if the system forbids it */
  GEMINI_FILE_ENGINE_THREADS = 2 /* pread and pwrite */
};
enum { GEMINI_LOG_ERROR = 1, GEMINI_LOG_WARNING = 2, GEMINI_LOG_INFO = 3, GEMINI_LOG_DEBUG = 4 };
enum {
  GEMINI_CONFIG_STRICT = 1, /* unmap an evicted chunk at once, after its users, so that an access too late faults */
  GEMINI_CONFIG_EXPLAIN_FAULTS = 2 /* simulated device only: a handler of SIGSEGV, which the library installs in the
                                      process while such managers are open, writes to stderr which arena and tensor an
                                      access that faults was to, and whether its chunk is acquired. Then the handler
                                      that was there before gets the signal, or the default action is taken. With
                                      STRICT every access to a chunk that has left the device faults; one to a chunk
                                      that is still there faults never. It knows 4,096 arenas of a process. A CUDA
                                      device: GEMINI_ERR_UNSUPPORTED */
};

/** Receives one log message. It is called from any thread, never while the library holds a lock, and must not call the
 *  library.
 *  @param level  GEMINI_LOG_*
 *  @param message  without a newline at its end; borrowed until return */
typedef void (*gemini_log_fn)(void *user, int32_t level, const char *message);

typedef struct gemini_config {
  uint32_t struct_size;         /* bytes; set by GEMINI_CONFIG_INIT */
  uint32_t flags;               /* GEMINI_CONFIG_*; unknown bits: GEMINI_ERR_INVALID */
  uint32_t placement;           /* GEMINI_PLACEMENT_* */
  uint32_t device;              /* GEMINI_DEVICE_* */
  uint32_t device_ordinal;      /* which GPU; 0 on the simulated device */
  uint32_t warmup_iterations;   /* iterations recorded before the first plan; 0 = 1, at most 1000 */
  uint32_t update_threads;      /* workers for updates and norms on the host, at most 256; 0 = usable cores - 1, or 1 */
  uint32_t log_level;           /* most verbose level delivered; 0 = GEMINI_LOG_WARNING */
  uint64_t device_bytes;        /* device budget, for arenas and non-model memory; required */
  uint64_t device_margin_bytes; /* of device_bytes, left unused as a safety margin */
  uint64_t host_bytes;  /* host budget; 0 = four fifths of what the process may still take (its cgroup's limit) */
  uint64_t file_bytes;  /* file budget; 0 = no file tier */
  uint64_t chunk_bytes; /* chunk size, a power of two from 64 KiB to 1 GiB; 0 = searched */
  double static_param_fraction; /* GEMINI_PLACEMENT_STATIC: of parameter bytes, 0..1 */
  double static_optim_fraction; /* GEMINI_PLACEMENT_STATIC: of master, momentum and variance bytes, 0..1 */
  uint64_t sim_h2d_bytes_per_s; /* simulated device: copy rate to the device; 0 = as fast as memcpy */
  uint64_t sim_d2h_bytes_per_s; /* simulated device: copy rate from the device; 0 = as fast as memcpy */
  const char *file_dir;         /* directories for the file tier, several separated by ':', over which chunks are
                                   striped; required when file_bytes > 0; borrowed */
  gemini_log_fn log_fn;         /* NULL: silent; stderr where the environment's GEMINI_LOG is error, warning, info or
                                   debug. gemini_manager_open() refuses other values of it, but an empty one */
  void *log_user;               /* passed to log_fn */
  uint32_t file_engine;         /* GEMINI_FILE_ENGINE_* */
  uint32_t cache_policy;        /* GEMINI_CACHE_* */
  const char *checkpoint_name;  /* name under which the files are kept, for gemini_checkpoint(); needs
                                   chunk_bytes; 1 to 200 bytes without '/', and no end like .1-2.3 (numbers): such
                                   names are gemini_group_checkpoint()'s; borrowed. NULL: the files vanish with the
                                   process */
  uint64_t watchdog_ns; /* a call that waits for longer (for queued work, transfers, workers, the system, another rank
                           or another call) is logged as a warning that says for how long and for what; again at twice
                           that time, and so on. With the first report of a wait, the text of gemini_manager_dump() is
                           logged, one message a line. A thread of the library's does it, which never waits for the
                           manager. Needs log_fn; 0: no watchdog */
} gemini_config_t;
#define GEMINI_CONFIG_INIT \
  { sizeof(gemini_config_t), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0, NULL, NULL, NULL, 0, 0, NULL, 0 }

/** Opens a manager: one device, one budget for each tier, one sequence of iterations.
 *  @param config  borrowed until return
 *  @param mgr_out  transferred to the caller; end with gemini_manager_close()
 *  @retval GEMINI_ERR_INVALID  a field is out of range; log_fn is NULL and GEMINI_LOG in the environment is none of its
 *           values; or 64 managers are open
 *  @retval GEMINI_ERR_UNSUPPORTED  this build or machine does not have the device; or flags do not fit it; or
 *           file_engine is GEMINI_FILE_ENGINE_URING, and io_uring cannot be set up
 *  @retval GEMINI_ERR_OOM_SYSTEM, GEMINI_ERR_OOM_FILE, GEMINI_ERR_IO  memory, addresses or files could not be reserved
 *  @retval GEMINI_ERR_BUSY  another process or manager has the files of checkpoint_name
 *  @retval GEMINI_ERR_FORMAT  the files of checkpoint_name do not fit the configuration, are damaged, or are others
 *  At most 64 managers exist at once. Since: 0.1 */
GEMINI_API gemini_status_t gemini_manager_open(const gemini_config_t *config, gemini_manager_t *mgr_out)
    GEMINI_MUST_CHECK;

/** Finishes pending updates, waits for the manager's streams, and frees all that the manager owns. NULL is accepted.
 *  @retval GEMINI_ERR_BUSY  the caller still has something acquired; nothing changed
 *  @retval GEMINI_ERR_HANDLE  there is no such manager
 *  If asynchronous work has failed before, the call frees everything and returns that failure. Blocks.
 *  Threads: no other call on this manager may run. Since: 0.1 */
GEMINI_API gemini_status_t gemini_manager_close(gemini_manager_t mgr);

/** Changes a tier's budget, inside an iteration or between two. If the new budget is smaller, chunks are evicted first.
 *  @param tier  GEMINI_TIER_*
 *  @retval GEMINI_ERR_OOM_DEVICE, GEMINI_ERR_OOM_HOST, GEMINI_ERR_OOM_FILE  the new budget is less than what the tier
 *           must keep, or no plan can be made with it; the message gives both figures; the old budget stays
 *  @retval GEMINI_ERR_IO  a chunk that must leave the tier could not be written to its file; the old budget stays
 *  Blocks while chunks leave a shrinking tier. Since: 0.1 */
GEMINI_API gemini_status_t gemini_budget_set(gemini_manager_t mgr, uint32_t tier, uint64_t bytes) GEMINI_MUST_CHECK;
/** @} */

/** @defgroup streams Streams
 *  A stream is a queue of device work that runs in order. On the simulated device it is a thread.
 *  @{ */
/** Creates a stream.
 *  @param stream_out  transferred to the caller; end with gemini_stream_destroy(). A manager has at most 48 at once
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_stream_create(gemini_manager_t mgr, gemini_stream_t *stream_out) GEMINI_MUST_CHECK;
/** Makes a stream of the caller usable here: a cudaStream_t or CUstream of the GPU's primary context, or NULL for its
 *  default stream. The caller keeps the stream. It must outlive the handle, and destroying the handle leaves the stream
 *  as it is.
 *  @param stream_out  as for gemini_stream_create()
 *  @retval GEMINI_ERR_UNSUPPORTED  the simulated device has no such streams
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_stream_adopt(gemini_manager_t mgr, void *native, gemini_stream_t *stream_out)
    GEMINI_MUST_CHECK;
/** Returns a stream as the GPU's own API names it, for work that the caller queues.
 *  @retval GEMINI_ERR_UNSUPPORTED  the simulated device has no such streams
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_stream_native(gemini_manager_t mgr, gemini_stream_t stream, void **native_out)
    GEMINI_MUST_CHECK;
/** Waits for the stream's work, then destroys the stream. NULL is accepted. Blocks.
 *  A call of another thread that names the stream meanwhile is waited for, with what it queues, or gets
 *  GEMINI_ERR_HANDLE; none queues work on a stream that is created later. What is acquired stays so, and is released
 *  with another stream or GEMINI_STREAM_CALLER.
 *  @retval GEMINI_ERR_BUSY  the open operator runs on the stream, or a graph was begun on it and has not ended, or is
 *           entered on it; nothing changed
 *  @retval GEMINI_ERR_STATE  the stream is being captured; nothing changed
 *  @retval GEMINI_ERR_DEVICE  the device cannot wait for the stream's work; the stream stays until the manager is
 *           closed
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_stream_destroy(gemini_manager_t mgr, gemini_stream_t stream);

typedef void (*gemini_call_fn)(void *user);
/** Queues fn(user) behind the stream's earlier work. On GEMINI_STREAM_CALLER, fn runs before the call returns.
 *  @param mgr  the stream's manager
 *  @param user  borrowed until fn has run; fn must not call the library, except gemini_version(),
 *           gemini_status_string() and gemini_last_error()
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_stream_call(gemini_manager_t mgr, gemini_stream_t stream, gemini_call_fn fn,
                                              void *user) GEMINI_MUST_CHECK;
/** Blocks until all work queued on the stream so far is done. Returns the stream's stored failure, if there is one.
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_stream_synchronize(gemini_manager_t mgr, gemini_stream_t stream) GEMINI_MUST_CHECK;
/** @} */

/** @defgroup arenas Arenas and tensors
 *  An arena is a range of device addresses that is reserved until the arena is destroyed. Tensors lie in it one after
 *  another and never move. The arena is cut into chunks, all of one size; a chunk moves between tiers as a whole. Bytes
 *  that were never written read as zero.
 *  @{ */
enum {
  GEMINI_KIND_PARAM = 0,
  GEMINI_KIND_GRAD = 1,
  GEMINI_KIND_MASTER = 2,
  GEMINI_KIND_MOMENTUM = 3,
  GEMINI_KIND_VARIANCE = 4,
  GEMINI_KIND_OTHER = 5
};

typedef struct gemini_arena_config {
  uint32_t struct_size;    /* bytes; set by GEMINI_ARENA_CONFIG_INIT */
  uint32_t kind;           /* GEMINI_KIND_* */
  uint32_t element_bytes;  /* 1..16, a power of two; 0 = 1 */
  uint32_t flags;          /* GEMINI_ARENA_* */
  uint64_t capacity_bytes; /* address range to reserve; costs no memory; 0 = the sum of the three budgets */
  const char *name;        /* at most 63 bytes; NULL = after its kind; borrowed until return */
  gemini_arena_t like;     /* NULL, or an arena whose layout in elements this one follows: a tensor registered there
                              has a counterpart here (gemini_tensor_counterpart) */
  gemini_arena_t reuse;    /* NULL, or (kind GRAD) a parameter arena whose bytes this one shares: a gradient takes its
                              parameter's bytes until the parameter is written again. Needs the same element_bytes;
                              implies like. Of tensors that overlap, all hold their gradients, or none does: they are
                              written by a range in which all of them lie. Bytes of no tensor between two gradients
                              that are at most 4,096 bytes apart become zero with them: keep other ranges in other
                              arenas */
  gemini_group_t
      group;           /* NULL, or (kind PARAM, follows no arena) the group whose ranks share the bytes, each a slice of
                           every chunk (gemini/group.h); arenas that follow this one are sharded in the same way */
  uint32_t zero_stage; /* with group: GEMINI_ZERO_* */
  uint32_t dtype;      /* of a gradient arena that follows a sharded one: GEMINI_DTYPE_*, the type of its values */
} gemini_arena_config_t;
#define GEMINI_ARENA_CONFIG_INIT { sizeof(gemini_arena_config_t), 0, 0, 0, 0, NULL, NULL, NULL, NULL, 0, 0 }
enum {
  /* What iterations access in the arena grows and shrinks from one to the next, as a cache of keys and values does.
   * That is no departure: iterations that write nowhere else are compared by the number and modes of their accesses of
   * it, not by their ranges (accesses of one range in one operator count once), and plans follow the newest ranges.
   * Not for an arena that follows another, or is sharded; a checkpoint keeps its bytes, not this flag. Since: 0.1 */
  GEMINI_ARENA_GROWS = 1
};
/** What ranks share of a sharded arena and those that follow it (Rajbhandari et al., "ZeRO", 2020). */
enum {
  /* Divided as PARAMS, but how long gathered chunks stay is chosen by the predicted step, between leaving after each
   * operator and staying until parameters change, as with STATES and GRADIENTS. All ranks choose the same, at the end
   * of the first iteration of a kind, and again of the third one. Results have the bits of PARAMS, which are those of
   * GRADIENTS: when gradients are added, and in which order, is not chosen. */
  GEMINI_ZERO_AUTO = 0,
  GEMINI_ZERO_STATES = 1,    /* optimizer states; gradients are added when an update or a norm needs them */
  GEMINI_ZERO_GRADIENTS = 2, /* and gradients, which are added as soon as a chunk of them is READY_FOR_REDUCE */
  GEMINI_ZERO_PARAMS = 3     /* and parameters: a chunk leaves the device after each operator that used it; in later
                              * iterations it may stay in half of the frames that operators do not need */
};

/** Reserves an arena.
 *  @param arena_out  transferred to the caller; end with gemini_arena_destroy() or gemini_manager_close()
 *  @retval GEMINI_ERR_INVALID  a field is out of range, or like or reuse names an arena that does not fit
 *  @retval GEMINI_ERR_UNSUPPORTED  a gradient arena that follows a sharded arena has another element_bytes
 *  @retval GEMINI_ERR_OOM_SYSTEM  no address range of that size is free
 *  A manager has at most 1,024 arenas at once. Since: 0.1 */
GEMINI_API gemini_status_t gemini_arena_create(gemini_manager_t mgr, const gemini_arena_config_t *config,
                                               gemini_arena_t *arena_out) GEMINI_MUST_CHECK;

/** Destroys an arena with its tensors and its bytes. NULL is accepted. When a reusing arena goes, parameters whose
 *  bytes its gradients had taken read as zero.
 *  @retval GEMINI_ERR_BUSY  a tensor or range of it is acquired or pinned, or another arena follows or reuses it
 *  @retval GEMINI_ERR_OOM_HOST, GEMINI_ERR_OOM_FILE  there is no room to zero the part of a chunk that gradients had
 *           taken, or to finish an update that waits for room
 *  Blocks until copies and updates that touch the arena are done. Since: 0.1 */
GEMINI_API gemini_status_t gemini_arena_destroy(gemini_manager_t mgr, gemini_arena_t arena);

typedef struct gemini_arena_info_s {
  uint32_t struct_size; /* bytes; set by GEMINI_ARENA_INFO_INIT */
  uint32_t kind;        /* GEMINI_KIND_* */
  uint64_t base;        /* device address of its first byte */
  uint64_t size_bytes;  /* used so far: end of the last tensor or reserved range */
  uint64_t capacity_bytes;
  uint64_t chunk_bytes; /* 0 before the size is chosen (the first access or iteration) */
  uint64_t tensor_count;
  uint32_t element_bytes;
  uint32_t reserved; /* 0 */
} gemini_arena_info_t;
#define GEMINI_ARENA_INFO_INIT { sizeof(gemini_arena_info_t), 0, 0, 0, 0, 0, 0, 0, 0 }
/** Says what an arena is; gemini_tier_bytes() says where its bytes are.
 *  @param info_out  allocated by the caller, struct_size set; borrowed until return
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_arena_info(gemini_manager_t mgr, gemini_arena_t arena, gemini_arena_info_t *info_out)
    GEMINI_MUST_CHECK;

/** Takes the next size_bytes of an arena as one plain range, for callers that place things in it themselves.
 *  @param offset_out  byte offset in the arena, a multiple of 256 elements
 *  @retval GEMINI_ERR_INVALID  size_bytes is 0, no multiple of element_bytes, or more than the arena has left
 *  @retval GEMINI_ERR_UNSUPPORTED  the arena is sharded, and gradients reuse its bytes
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_arena_take(gemini_manager_t mgr, gemini_arena_t arena, uint64_t size_bytes,
                                             uint64_t *offset_out) GEMINI_MUST_CHECK;
/** As gemini_arena_take(), for callers that keep pointers: they name bytes with gemini_address_access().
 *  @param ptr_out  device address of the first byte, which never changes; a multiple of 256 elements behind the arena's
 *           base. Not to be used before it is acquired. The same elements of an arena that follows this one are as far
 *           behind that one's base (gemini_arena_info_t.base), in elements
 *  @retval GEMINI_ERR_INVALID, GEMINI_ERR_UNSUPPORTED  as for gemini_arena_take(); nothing changed
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_arena_take_pointer(gemini_manager_t mgr, gemini_arena_t arena, uint64_t size_bytes,
                                                     void **ptr_out) GEMINI_MUST_CHECK;

#define GEMINI_OFFSET_NEXT UINT64_MAX
/** Registers a tensor.
 *  @param arena  an arena that neither follows nor reuses another
 *  @param name  1 to 127 bytes of any kind, unique in the manager; copied. Messages, dumps and files of the library
 *           write control characters in it as %0A
 *  @param size_bytes  a multiple of the arena's element_bytes, not 0
 *  @param offset_bytes  GEMINI_OFFSET_NEXT: the arena's next free offset, a multiple of 256 elements. Otherwise an
 *           offset inside ranges taken before; tensors may overlap (tied weights)
 *  @param tensor_out  transferred to the caller; end with gemini_tensor_unregister() or by destroying the arena
 *  @retval GEMINI_ERR_EXISTS  another tensor has the name
 *  @retval GEMINI_ERR_STATE  a part of the range, but not all, has been taken by a gradient
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_tensor_register(gemini_manager_t mgr, gemini_arena_t arena, const char *name,
                                                  uint64_t size_bytes, uint64_t offset_bytes,
                                                  gemini_tensor_t *tensor_out) GEMINI_MUST_CHECK;
/** Forgets a tensor. Its bytes stay in the arena; those that its gradient had taken are the gradient's still, and count
 *  as parameters from then on. NULL is accepted.
 *  @retval GEMINI_ERR_BUSY  the tensor or a counterpart of it is acquired
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_tensor_unregister(gemini_manager_t mgr, gemini_tensor_t tensor);
/** Finds a tensor by its name.
 *  @retval GEMINI_ERR_NOT_FOUND  no tensor has this name
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_tensor_find(gemini_manager_t mgr, const char *name, gemini_tensor_t *tensor_out)
    GEMINI_MUST_CHECK;
/** Returns the tensor that has the same elements in another arena, which follows or reuses the tensor's own. Since: 0.1
 */
GEMINI_API gemini_status_t gemini_tensor_counterpart(gemini_manager_t mgr, gemini_tensor_t tensor, gemini_arena_t arena,
                                                     gemini_tensor_t *tensor_out) GEMINI_MUST_CHECK;

/** Tensor states. These transitions are legal (docs/states.md has the table, with reasons):
 *  FREE -> HOLD, COMPUTE; HOLD -> FREE, COMPUTE, READY_FOR_REDUCE; COMPUTE -> HOLD, HOLD_AFTER_FWD, HOLD_AFTER_BWD;
 *  HOLD_AFTER_FWD -> HOLD, COMPUTE; HOLD_AFTER_BWD -> HOLD, COMPUTE, READY_FOR_REDUCE; READY_FOR_REDUCE -> HOLD,
 *  COMPUTE. */
enum {
  GEMINI_STATE_FREE = 0,             /* has no bytes yet: reads as zero, takes no memory */
  GEMINI_STATE_HOLD = 1,             /* has bytes; is not acquired */
  GEMINI_STATE_HOLD_AFTER_FWD = 2,   /* as HOLD; last used in a forward phase */
  GEMINI_STATE_HOLD_AFTER_BWD = 3,   /* as HOLD; last used in a backward phase */
  GEMINI_STATE_COMPUTE = 4,          /* acquired; must not move */
  GEMINI_STATE_READY_FOR_REDUCE = 5, /* its gradient is complete */
  GEMINI_STATE_COUNT = 6
};
/** Moves a tensor to HOLD, READY_FOR_REDUCE or FREE, which drops its bytes lazily. Only an acquire enters COMPUTE, and
 *  only a release leaves it.
 *  @retval GEMINI_ERR_STATE  the transition is not in the table; nothing changed
 *  @retval GEMINI_ERR_OOM_HOST, GEMINI_ERR_DEVICE  for FREE, as for gemini_zero()
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_tensor_state_set(gemini_manager_t mgr, gemini_tensor_t tensor, uint32_t state)
    GEMINI_MUST_CHECK;

typedef struct gemini_tensor_info_s {
  uint32_t struct_size; /* bytes; set by GEMINI_TENSOR_INFO_INIT */
  uint32_t state;       /* GEMINI_STATE_* */
  uint64_t address;     /* device address; never changes; 0: a sharded arena of states, which has none */
  uint64_t size_bytes;
  uint64_t offset_bytes; /* in its arena */
  gemini_arena_t arena;
  uint64_t users; /* acquires not yet released */
  char name[128]; /* of a counterpart: the registered tensor's name */
} gemini_tensor_info_t;
#define GEMINI_TENSOR_INFO_INIT { sizeof(gemini_tensor_info_t), 0, 0, 0, 0, NULL, 0, "" }
/** Says what a tensor is, and its state; gemini_tier_bytes() says where its bytes are.
 *  @param info_out  allocated by the caller, struct_size set; borrowed until return
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_tensor_info(gemini_manager_t mgr, gemini_tensor_t tensor,
                                              gemini_tensor_info_t *info_out) GEMINI_MUST_CHECK;
/** @} */

/** @defgroup brackets Iterations, phases, operators
 *  An iteration is one training step. A phase is a part of it: forward, backward or update. An operator is a unit of
 *  work with a name and a stream, such as a layer's forward. The library records which operators an iteration has, in
 *  their order, and what each acquires and allocates. From the record it makes a plan: which chunks to fetch and to
 *  evict before which operator. An iteration that departs from its plan is served on demand and gets a plan of its own.
 *  Passes of other kinds, such as an evaluation (a forward pass alone), are iterations, too: each kind gets a plan of
 *  its own. Iterations that write no bytes of arenas, such as the tokens of a generated text, count as one kind while
 *  their allocations differ by less than a 64th of the device budget from those seen before: a cache may grow from one
 *  to the next. What is acquired outside iterations is served on demand and not recorded.
 *  Brackets may be set from any thread, one at a time.
 *  @{ */
enum { GEMINI_PHASE_NONE = 0, GEMINI_PHASE_FORWARD = 1, GEMINI_PHASE_BACKWARD = 2, GEMINI_PHASE_UPDATE = 3 };
/** Begins an iteration.
 *  @retval GEMINI_ERR_STATE  an iteration is open already
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_iteration_begin(gemini_manager_t mgr) GEMINI_MUST_CHECK;
/** Begins an iteration and says of which sort it is, where a program knows that: a training step or an evaluation, a
 *  prompt or the next token, the one or the other model. An iteration is expected to be like earlier ones of its label,
 *  and is compared with those alone, so that iterations of several labels may follow each other in any order.
 *  @param label  any number; 0 is the label of gemini_iteration_begin()
 *  @retval GEMINI_ERR_STATE  an iteration is open already
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_iteration_begin_with(gemini_manager_t mgr, uint64_t label) GEMINI_MUST_CHECK;
/** Ends the iteration. If warm-up ends with it, or it departed from what was known, the next plan is made here. While
 *  an iteration is still being learned (in warm-up, or after a departure), the call blocks until its operators' work is
 *  done.
 *  @retval GEMINI_ERR_STATE  no iteration is open, or an operator still is
 *  @retval GEMINI_ERR_OOM_DEVICE  an operator's working set does not fit: the message names the operator and the bytes
 *           that it lacks. The iteration has ended; the next ones are served on demand
 *  @retval GEMINI_ERR_BUSY  arenas are sharded, and another thread's gemini_group_exchange() of one of their groups is
 *           under way. The iteration is open; a later call goes on where this one stood
 *  @retval GEMINI_ERR_OOM_SYSTEM  there is no memory for what the ranks of a group compare: as BUSY; or for a plan: the
 *           iteration has ended, as `iterations` in statistics tells
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_iteration_end(gemini_manager_t mgr) GEMINI_MUST_CHECK;
/** Sets the phase that the next operators are in. It may change between operators, and is GEMINI_PHASE_NONE again after
 *  the iteration. The phase moves nothing and keeps nothing: it is one of the marks by which an operator is known again
 *  (gemini_op_begin()), and it decides the state of a tensor that is released: HOLD_AFTER_FWD, HOLD_AFTER_BWD or HOLD.
 *  A loop that never sets it works, and gets the same plan.
 *  @param phase  GEMINI_PHASE_*
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_phase_set(gemini_manager_t mgr, uint32_t phase) GEMINI_MUST_CHECK;
/** Opens an operator. Acquires and allocations until gemini_op_end() count as its own. It is known again in the next
 *  iterations by its place in their order, its name and its phase.
 *  @param name  1 to 127 bytes; copied. An operator should have the same name in every iteration. Names may repeat
 *           within an iteration: a loop over equal layers may use one name for all
 *  @param stream  where its work is queued
 *  @retval GEMINI_ERR_STATE  no iteration is open, or an operator is open already, or a gemini_iteration_end() has
 *           failed that must be repeated first
 *  @retval GEMINI_ERR_OOM_DEVICE  arenas are sharded, and what is to be gathered for it finds no room
 *  If it fails, the operator is not open, and the call can be repeated. Since: 0.1 */
GEMINI_API gemini_status_t gemini_op_begin(gemini_manager_t mgr, const char *name, gemini_stream_t stream)
    GEMINI_MUST_CHECK;
/** Closes the operator. What was acquired in it may be released later; what gemini_op_begin_with() acquired is released
 *  first, behind the work queued on the operator's stream so far.
 *  @retval GEMINI_ERR_STATE  no operator is open; or the caller has released some of those ranges itself: the message
 *           names one, and nothing changed
 *  @retval GEMINI_ERR_BUSY, GEMINI_ERR_OOM_HOST  arenas are sharded, and parameters that it wrote cannot be copied to
 *           this rank's slices, as one is acquired or there is no room: the operator is open; the call can be repeated
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_op_end(gemini_manager_t mgr) GEMINI_MUST_CHECK;
/** @} */

/** @defgroup access Acquire and release
 *  A range must be acquired before it is used, and released afterwards. While it is acquired, its chunks stay where
 *  they are.
 *  @{ */
enum {
  GEMINI_READ = 1,
  GEMINI_WRITE = 2, /* without READ: every byte of the range will be written, so its old bytes are not fetched */
  GEMINI_READ_WRITE = 3
};
/** What an access names: a tensor or an arena. Set the one member that applies; the handle itself says which kind it
 *  is. A union is typed for each kind and is one word: with two fields, each call would have to check for both and for
 *  neither. */
typedef union gemini_object {
  gemini_tensor_t tensor;
  gemini_arena_t arena;
} gemini_object_t;
typedef struct gemini_access {
  uint32_t struct_size;   /* bytes; set by GEMINI_ACCESS_INIT and the functions below; in an array the same in all */
  uint32_t mode;          /* GEMINI_READ, GEMINI_WRITE, GEMINI_READ_WRITE */
  uint32_t tier;          /* where the bytes are wanted: GEMINI_TIER_DEVICE or GEMINI_TIER_HOST */
  uint32_t reserved;      /* 0 */
  gemini_object_t object; /* NULL: an access by address (gemini_address_access()) */
  uint64_t offset_bytes;  /* in the object; by address: the device address of the first byte */
  uint64_t size_bytes;    /* 0 with offset 0: the whole tensor, or all of the arena that is used at this call. If the
                            arena has grown since an acquire, the release names the size at the acquire; if it had no
                            bytes, nothing was acquired, and nothing is to be released */
  void *ptr;              /* out: first byte of the range, valid until release. A range's device address never changes;
                            its host address may differ next time */
} gemini_access_t;
#define GEMINI_ACCESS_INIT { sizeof(gemini_access_t), 0, 0, 0, { NULL }, 0, 0, NULL }
/** An access to a range of a tensor. Parameters are the fields of the same names. Compiled into the caller, so that it
 *  has the caller's size of the struct; no symbol of the library.
 *  Since: 0.1 */
static inline gemini_access_t gemini_tensor_access(gemini_tensor_t tensor, uint64_t offset_bytes, uint64_t size_bytes,
                                                   uint32_t mode, uint32_t tier) {
  gemini_access_t access = { sizeof(gemini_access_t), mode, tier, 0, { tensor }, offset_bytes, size_bytes, NULL };
  return access;
}
/** An access to a range of an arena, otherwise as gemini_tensor_access().
 *  Since: 0.1 */
static inline gemini_access_t gemini_arena_access(gemini_arena_t arena, uint64_t offset_bytes, uint64_t size_bytes,
                                                  uint32_t mode, uint32_t tier) {
  gemini_access_t access = { sizeof(gemini_access_t), mode, tier, 0, { NULL }, offset_bytes, size_bytes, NULL };
  access.object.arena = arena;
  return access;
}
/** An access to bytes that the caller has a pointer to, otherwise as gemini_tensor_access(). It stands for the same
 *  range of the arena that the bytes lie in, whatever tensors are there: every function takes it where it takes a range
 *  of an arena. The range must not reach beyond what is used of the arena. Where gradients reuse the bytes of an arena,
 *  an address does not say which of the two is meant, and the access is refused (GEMINI_ERR_UNSUPPORTED), unless the
 *  arena is sharded.
 *  @param address  a device address in an arena; gemini_locate() of gemini/address.h says of which. It is not followed
 *  @param size_bytes  not 0
 *  Since: 0.1 */
static inline gemini_access_t gemini_address_access(const void *address, uint64_t size_bytes, uint32_t mode,
                                                    uint32_t tier) {
  gemini_access_t access = { sizeof(gemini_access_t), mode, tier, 0, { NULL }, 0, size_bytes, NULL };
  access.offset_bytes = (uint64_t)(uintptr_t)address;
  return access;
}
/** Fills an array with accesses to rows of a table, such as the rows of an embedding that a batch names, so that not
 *  all of the table is acquired. The rows are sorted, each is named once, and neighbours become one access. If that
 *  makes more accesses than there is room for, the smallest gaps between them are closed: the rows in a gap are then
 *  acquired with their neighbours, which a write without a read (GEMINI_WRITE) forbids, as it would have to write them.
 *  @param table  the table: its object (or address), range, mode and tier; borrowed until return. size_bytes: rows
 *           times row_bytes, not 0
 *  @param row_bytes  bytes from one row to the next, not 0
 *  @param index_bytes  bytes of an index: 4 or 8. Indexes are integers without a sign: a negative one is out of range
 *  @param row_count  indexes at rows, 0 to 2^20. The same row may be named several times
 *  @param rows  row_count indexes, in any order, each below size_bytes / row_bytes; borrowed until return
 *  @param capacity  accesses that accesses_out has room for, not 0
 *  @param accesses_out  receives the accesses, in ascending order, for gemini_acquire() and gemini_release(). On
 *           failure, it is as it was
 *  @param count_out  receives how many there are: 0 only with row_count 0
 *  @retval GEMINI_ERR_INVALID  a value is out of range: the message names the first index that is, and the number of
 *           rows; or the mode is GEMINI_WRITE and capacity is too small: the message says how much is needed
 *  @retval GEMINI_ERR_OOM_SYSTEM  there is no memory to sort the rows
 *  Threads: any; needs no manager, and does not see whether the object exists. Since: 0.1 */
GEMINI_API gemini_status_t gemini_row_accesses(const gemini_access_t *table, uint64_t row_bytes, uint32_t index_bytes,
                                               uint64_t row_count, const void *rows, uint64_t capacity,
                                               gemini_access_t *accesses_out, uint64_t *count_out) GEMINI_MUST_CHECK;

/** Makes a batch of ranges usable, all or none. On the device, work queued on the stream after this call sees the
 *  bytes. On the host, the call blocks until they are there.
 *  @param accesses  borrowed until return; on success, ptr of each is set
 *  @param count  0 to 2^20
 *  @retval GEMINI_ERR_INVALID  a value is out of range, or an access has another struct_size than the first; the
 *           message names its index
 *  @retval GEMINI_ERR_BUSY  a range is acquired on the host for writing and wanted on the device, or the other way
 *           round; or another thread's gemini_load() uses its chunks
 *  @retval GEMINI_ERR_STATE  the batch reads, or writes in part, a parameter whose bytes its gradient has taken, or a
 *           gradient whose bytes its parameter has; or it writes both. A range of an arena stands for the tensors in
 *           it. A tensor that is overwritten whole (GEMINI_WRITE) takes the bytes
 *  @retval GEMINI_ERR_OOM_DEVICE, GEMINI_ERR_OOM_HOST  the batch does not fit beside what is acquired, pinned and
 *           allocated; the message says what holds the memory
 *  @retval GEMINI_ERR_IO  a chunk could not be read from its file
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_acquire(gemini_manager_t mgr, gemini_access_t *accesses, uint64_t count,
                                          gemini_stream_t stream) GEMINI_MUST_CHECK;
/** Ends the use of acquired ranges, after the work queued on the stream so far; on the host, too, as work of a GPU can
 *  read and write there. Object, range, mode and tier must be those of the acquire. ptr is ignored on the device, and
 *  on the host must be the one that the acquire returned.
 *  @retval GEMINI_ERR_STATE  one of the ranges is not acquired with this mode and tier, or it is on the host while the
 *           stream is being captured; nothing changed
 *  @retval GEMINI_ERR_DEVICE  the device refused to mark the stream: all ranges are released all the same
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_release(gemini_manager_t mgr, const gemini_access_t *accesses, uint64_t count,
                                          gemini_stream_t stream) GEMINI_MUST_CHECK;
/** Opens an operator and acquires what it uses on its stream; gemini_op_end() releases that. The caller keeps no list.
 *
 *      gemini_access_t uses[] = { gemini_address_access(w, bytes, GEMINI_READ, GEMINI_TIER_DEVICE), ... };
 *      TRY(gemini_op_begin_with(mgr, "forward 3", stream, uses, 2));
 *      ... queue the work ...
 *      TRY(gemini_op_end(mgr));
 *
 *  @param name, stream  as for gemini_op_begin()
 *  @param accesses, count  as for gemini_acquire(); borrowed until return. Not to be released by the caller
 *  If either call fails, both have: the operator is not open and nothing is acquired. The statuses are those of
 *  gemini_op_begin() and gemini_acquire(), and GEMINI_ERR_OOM_SYSTEM: there is no memory for the list. Since: 0.1 */
GEMINI_API gemini_status_t gemini_op_begin_with(gemini_manager_t mgr, const char *name, gemini_stream_t stream,
                                                gemini_access_t *accesses, uint64_t count) GEMINI_MUST_CHECK;
/** Brings ranges to their tier (DEVICE, HOST or FILE) soon. It only takes free memory and never evicts, except in
 *  iterations with operators chosen at run time (gemini/chosen.h); where there is none it has no effect. For ranges
 *  without contents and HOST, a thread commits memory in the order of the accesses; it is given back after an iteration
 *  in which no memory of the host tier came into use. mode is ignored. Of sharded arenas, this call and the three below
 *  are for this rank's slices (gemini/group.h). Since: 0.1 */
GEMINI_API gemini_status_t gemini_hint(gemini_manager_t mgr, const gemini_access_t *accesses, uint64_t count)
    GEMINI_MUST_CHECK;
/** Moves ranges to their tier (DEVICE, HOST or FILE) now, and evicts for them where needed. Whole chunks move. A chunk
 *  leaves the device behind the queued work that uses it. mode is ignored.
 *  @retval GEMINI_ERR_BUSY  a chunk is acquired or pinned where it would have to leave
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_move(gemini_manager_t mgr, const gemini_access_t *accesses, uint64_t count)
    GEMINI_MUST_CHECK;
/** Brings a range to the device and keeps it there until gemini_unpin(). Pins nest. Since: 0.1 */
GEMINI_API gemini_status_t gemini_pin(gemini_manager_t mgr, const gemini_access_t *access) GEMINI_MUST_CHECK;
/** Undoes one pin of a range.
 *  @retval GEMINI_ERR_STATE  a chunk of the range is not pinned
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_unpin(gemini_manager_t mgr, const gemini_access_t *access) GEMINI_MUST_CHECK;
/** @} */

/** @defgroup alloc Non-model memory
 *  Memory outside arenas, from the same budgets: activations, workspace, staging.
 *  @{ */
/** Allocates device memory, aligned to 512 bytes. If the budget is full, chunks are evicted. The bytes are undefined:
 *  whatever was there before. (Those of arenas read as zero until they are written.)
 *  @param ptr_out  transferred to the caller; end with gemini_free(). Work queued on stream may use it
 *  @retval GEMINI_ERR_OOM_DEVICE  nothing more can be evicted; the message says what holds the memory
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_alloc(gemini_manager_t mgr, uint64_t size_bytes, gemini_stream_t stream,
                                        void **ptr_out) GEMINI_MUST_CHECK;
/** Frees memory behind the work queued on stream so far, which must include its last use. NULL is accepted.
 *  @retval GEMINI_ERR_INVALID  ptr is not the start of a live allocation
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_free(gemini_manager_t mgr, void *ptr, gemini_stream_t stream);
/** Allocates page-locked host memory from the host budget, for staging, for activations kept on the host, for small
 *  tensors. Chunks make room for it. The bytes are undefined.
 *  For a GPU it is page-locked in parts that begin at multiples of 1 MiB, and the driver refuses a copy across two of
 *  them (CUDA_ERROR_INVALID_VALUE): split copies at multiples of 1 MiB, or give a small block an alignment that is not
 *  below its size.
 *  @param alignment  a power of two up to 2 MiB; 0 = 16
 *  @param ptr_out  transferred to the caller; end with gemini_host_free(), or with the manager
 *  @retval GEMINI_ERR_OOM_HOST  the budget has no room, or chunks acquired on the host lie in the way
 *  @retval GEMINI_ERR_INVALID  size_bytes is 0, or alignment is no power of two
 *  May block while chunks leave for files. Since: 0.1 */
GEMINI_API gemini_status_t gemini_host_alloc(gemini_manager_t mgr, uint64_t size_bytes, uint64_t alignment,
                                             void **ptr_out) GEMINI_MUST_CHECK;
/** Frees host memory at once: no queued work may use it any more. NULL is accepted.
 *  @retval GEMINI_ERR_INVALID  ptr is not the start of a live block
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_host_free(gemini_manager_t mgr, void *ptr);
/** @} */

/** @defgroup data Zero, load, store, norm, update
 *  @{ */
/** Makes a range read as zero. Whole chunks cost nothing until they are used. A parameter in it that is zeroed whole
 *  takes its bytes back: the gradient that had taken them is discarded.
 *  @param access  object and range; mode and tier are ignored
 *  @retval GEMINI_ERR_BUSY  a part of the range is acquired
 *  @retval GEMINI_ERR_STATE  the range has a part, but not all, of a parameter whose bytes its gradient has taken
 *  @retval GEMINI_ERR_OOM_HOST  the host has no room for a chunk that is zeroed in part; nothing changed
 *  @retval GEMINI_ERR_DEVICE  the device refused; parts of the range on it may be zero
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_zero(gemini_manager_t mgr, const gemini_access_t *access) GEMINI_MUST_CHECK;
/** Says that nobody wants the bytes of a range any more, such as those of gradients behind gemini_update(). It waits
 *  for nothing: late updates (GEMINI_UPDATE_LATE) still read the bytes. Then whole chunks of the range leave the device
 *  without being copied to the host, which plans do not count on. Until the bytes are written again they are what they
 *  were, or zeros; an acquire finds one of the two, and ends this for its chunks. Chunks in use, and pinned ones, stay
 *  as they are, and so do sharded arenas, and arenas of which one reuses the other's bytes.
 *  @param access  object and range; mode and tier are ignored
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_discard(gemini_manager_t mgr, const gemini_access_t *access) GEMINI_MUST_CHECK;
/** Reads a range from a file descriptor into the tier below the device. A tensor that is read into, even in part, goes
 *  from FREE to HOLD. A parameter that is read whole takes its bytes back: the gradient that had taken them is
 *  discarded; a gradient that is read whole takes those of its parameter. Blocks. While it runs, calls of other threads
 *  that use a chunk of the range fail with GEMINI_ERR_BUSY, except those that only move it to the host or to a file.
 *  @param fd_offset  byte offset in the file
 *  @retval GEMINI_ERR_IO, GEMINI_ERR_FORMAT  reading failed, or the file ends early: the bytes that were read are
 *           changed, the rest of the range is not; native_code is errno or 0. GEMINI_ERR_DEVICE and
 *           GEMINI_ERR_OOM_SYSTEM leave the same, once reading has begun
 *  @retval GEMINI_ERR_OOM_HOST  the range does not fit on the host; nothing changed. With a file tier, or when other
 *           threads take room meanwhile, a part may have been read, as for GEMINI_ERR_IO; the same holds for
 *           GEMINI_ERR_OOM_FILE
 *  @retval GEMINI_ERR_BUSY  a part of the range is acquired, pinned to the device, or being loaded; nothing changed
 *  @retval GEMINI_ERR_STATE  the range has a part, but not all, of a parameter whose bytes its gradient has taken, or
 *           the other way round
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_load(gemini_manager_t mgr, const gemini_access_t *access, int fd, uint64_t fd_offset)
    GEMINI_MUST_CHECK;
/** Makes a range have the bytes of a file without reading them: they are read when they are wanted, and stay in the
 *  file otherwise, which is the tier below the host for them, without a budget or a copy. So what is only read, as the
 *  weights of a model that generates text, takes no more host memory than there is, and none of the file tier; what is
 *  written leaves the file for good. Where the range ends inside a chunk that has other bytes elsewhere, the part in
 *  that chunk is loaded. The file is read through the page cache, as often as chunks return to the host.
 *
 *  The file must stay as it is, as long as ranges have its bytes. A file that was replaced under its name does; one
 *  that has another size or time of modification is not read any more: uses of the range fail with GEMINI_ERR_FORMAT.
 *  @param access  object and range; mode and tier are ignored
 *  @param fd  a regular file, open for reading; it may be closed afterwards. Ranges of at most 256 files are borrowed
 *           at once
 *  @param fd_offset  byte offset in the file; of any alignment
 *  @retval GEMINI_ERR_INVALID  fd is not of a regular file, or not open for reading, or ranges of 256 other files are
 *           borrowed; nothing changed
 *  @retval GEMINI_ERR_FORMAT  the file ends early, or was changed since a range was borrowed from it that still has its
 *           bytes there; nothing changed
 *  @retval GEMINI_ERR_IO  the file cannot be looked at, or opened for reading; nothing changed
 *  @retval GEMINI_ERR_BUSY  a part of the range is acquired, pinned to the device, or being loaded; nothing changed
 *  @retval GEMINI_ERR_STATE  a gradient has taken bytes of the range
 *  @retval GEMINI_ERR_UNSUPPORTED  the arena is sharded, or file_engine asks for an engine that does not work
 *  Where a part is loaded, also what gemini_load() returns of reading it; then nothing is borrowed, and parts may have
 *  been read. Since: 0.1 */
GEMINI_API gemini_status_t gemini_borrow(gemini_manager_t mgr, const gemini_access_t *access, int fd,
                                         uint64_t fd_offset) GEMINI_MUST_CHECK;
/** Writes a range to a file descriptor at fd_offset, from wherever its newest bytes are. Blocks.
 *  @retval GEMINI_ERR_INVALID  fd was opened with O_APPEND: the system would write elsewhere
 *  @retval GEMINI_ERR_STATE  the range is of a parameter whose bytes its gradient has taken, or the other way round; a
 *           range of an arena is written as it is. Or ranges are borrowed (gemini_borrow()) from the file of fd, which
 *           must not change; nothing was written
 *  @retval GEMINI_ERR_IO, GEMINI_ERR_OOM_FILE  writing failed, or the disk, a quota or the limit on file sizes is
 *           exhausted: a part of the range may have been written; native_code is errno
 *  @retval GEMINI_ERR_BUSY  a part of the range is acquired for writing, or being loaded; nothing was written, unless
 *           another thread began that during the call
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_store(gemini_manager_t mgr, const gemini_access_t *access, int fd, uint64_t fd_offset)
    GEMINI_MUST_CHECK;

enum { GEMINI_DTYPE_F32 = 0, GEMINI_DTYPE_BF16 = 1, GEMINI_DTYPE_F16 = 2, GEMINI_DTYPE_F64 = 3 };
/** Returns the Euclidean norm of a range, summed in double where each chunk is; on the host, by the workers of updates.
 *  The order of additions depends only on the range and its bytes: left to right within each 64 KiB of the arena, then
 *  over these sums. The result therefore has the same bits wherever chunks are. Pending updates of the range are done
 *  first. In a reusing arena, a gradient that was not written counts as zero. Blocks.
 *  @param access  object and range, a multiple of the dtype's size; mode and tier are ignored
 *  @param stream  the work that produced the range
 *  @retval GEMINI_ERR_STATE  the range has a parameter, or a part of one, whose bytes its gradient has taken
 *  @retval other  a chunk could not be brought to the host; norm_out is untouched
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_norm(gemini_manager_t mgr, const gemini_access_t *access, uint32_t dtype,
                                       gemini_stream_t stream, double *norm_out) GEMINI_MUST_CHECK;

typedef struct gemini_update_span {
  uint32_t struct_size;   /* bytes the library filled: fields behind them are not there */
  uint32_t tier;          /* GEMINI_TIER_HOST: compute now. GEMINI_TIER_DEVICE: only queue work on stream */
  uint64_t first_element; /* of the arenas */
  uint64_t element_count;
  gemini_stream_t stream; /* GEMINI_TIER_DEVICE only */
  uint32_t arena_count;
  uint32_t pass; /* GEMINI_PASS_*: BOTH, unless the update has GEMINI_UPDATE_PASSES */
  void *ptr[8];  /* in the order of gemini_update_t.arenas: the element first_element of each */
  void *out[8];  /* likewise: where fn writes. The same as ptr, but beside the old values (SPECULATE, PASSES), which fn
                    must not change then, it is memory of undefined contents; NULL: not in this pass. For an arena with
                    mode WRITE, ptr is as out; for one with mode READ, out is as ptr */
} gemini_update_span_t;
/* RESULTS: write the arenas of mode WRITE alone, as parameters are; STATES, later: those of mode READ_WRITE alone. */
enum { GEMINI_PASS_BOTH, GEMINI_PASS_RESULTS, GEMINI_PASS_STATES };
/** Updates one span.
 *  HOST: it is called on the library's workers, whose nice values are higher by 10 than that of the thread which opened
 *  the manager, several spans at once, and must not call the library. DEVICE: it is called on the thread of
 *  gemini_update(); for a span that had to wait, on a thread that uses one of its chunks or waits for updates, or on a
 *  thread of the library; one span of a manager at a time. There it may call gemini_stream_call() and
 *  gemini_stream_native() only, and must not wait for another thread: until it returns, other threads' calls that look
 *  at chunks wait. In both, it may call gemini_last_error() and gemini_error_set().
 *  @param span  borrowed until return */
typedef void (*gemini_update_fn)(void *user, const gemini_update_span_t *span);
/** As gemini_update_fn, but it can fail: gemini_update_t.try_fn. A failure is final. The other spans of the update run
 *  all the same; gemini_update(), gemini_update_wait() and gemini_manager_close() report the first failure from then
 *  on, and no further update is accepted, as the bytes of the model are not what they should be.
 *  @return GEMINI_OK or a negative status; any other value counts as GEMINI_ERR_INVALID. If the callback recorded a
 *          failure with this status on its thread (gemini_error_set()), its message is reported, too */
typedef gemini_status_t (*gemini_update_try_fn)(void *user, const gemini_update_span_t *span);

enum {
  GEMINI_UPDATE_LATE =
      1, /* return at once; each chunk is updated before its next use. For the caller the update is done
                            when the call returns: every later call sees updated bytes, and gradients may be zeroed or
                            written for the next step: the update has those of this one. What remains: user stays
                            borrowed (or has user_bytes), the uses pay for what is not updated yet, and a failure is
                            reported by them and by gemini_update_wait() */
  GEMINI_UPDATE_SPECULATE = 2, /* compute new values into spare host memory, beside the old ones: gemini_update() */
  GEMINI_UPDATE_COMMIT = 4,    /* take over what was speculated, and run fn for the rest: gemini_update() */
  GEMINI_UPDATE_PART = 8,      /* of sharded arenas, whose gradients have bytes of their own, a part: gemini/group.h */
  GEMINI_UPDATE_PASSES = 16    /* fn can compute a span in two passes: gemini_update() */
};
typedef struct gemini_update_s {
  uint32_t struct_size;         /* bytes; set by GEMINI_UPDATE_INIT */
  uint32_t flags;               /* GEMINI_UPDATE_* */
  const gemini_arena_t *arenas; /* arena_count arenas of one layout: an arena and arenas that follow it; borrowed */
  const uint32_t *modes;        /* arena_count of GEMINI_READ, GEMINI_WRITE, GEMINI_READ_WRITE; borrowed */
  uint32_t arena_count;         /* 1..8 */
  uint32_t reserved;            /* 0 */
  uint64_t first_element;
  uint64_t element_count; /* not 0; but 0 with first_element 0: all elements used so far */
  gemini_stream_t stream; /* the update comes after this stream's work queued so far */
  gemini_update_fn fn;    /* or NULL, and try_fn */
  void *user;             /* borrowed until every span has run: gemini_update_wait(), or a use of what it writes */
  uint64_t user_bytes; /* not 0: the call copies so many bytes, at most 1 MiB, from user, which is borrowed until return
                          only. All spans get the same copy, aligned to 16 bytes; it stays until their work, queued
                          work included, is done. Spans run at once: what they write to it, they write as to any memory
                          that threads share */
  gemini_update_try_fn try_fn; /* or NULL, and fn */
} gemini_update_t;
#define GEMINI_UPDATE_INIT { sizeof(gemini_update_t), 0, NULL, NULL, 0, 0, 0, 0, NULL, NULL, NULL, 0, NULL }

/** Runs fn on every part of several arenas of one layout, in the tier where its chunks are. A span is a part of the
 *  range within one chunk of the arena with the smallest elements, and on the host within one chunk of every arena.
 *  Spans do not overlap, and together they cover the range. In a reusing arena, a gradient that was not written since
 *  its parameter was reads as zero. An arena with mode WRITE must be written whole. Afterwards the written tensors are
 *  in state HOLD and hold parameters again.
 *  An accepted update is done as a whole. Spans that cannot run yet, because their chunks have no room or could not be
 *  moved, or because the link to the device has much to do, stay pending together with user. They run as soon as they
 *  can, and before any use of their chunks; until then such a use fails with what keeps them from running.
 *  @retval GEMINI_ERR_BUSY  a part of the range is acquired; nothing changed
 *  @retval GEMINI_ERR_INVALID  a value is out of range, or a bound of the range cuts a tensor whose bytes hold a
 *           gradient while its parameter is to be written; nothing changed
 *  @retval GEMINI_ERR_STATE  the update reads a parameter whose bytes its gradient has taken, or would take as zero; or
 *           it reads a gradient in a reusing arena that was not written and does not write its parameter; nothing
 *           changed
 *  @retval GEMINI_ERR_OOM_HOST  there is no file tier and the host has no room for the chunks; nothing changed
 *  @retval GEMINI_ERR_PENDING  (never with GEMINI_UPDATE_LATE) the update was accepted and is not done, or cannot be
 *           done; the message says how far it is and why. gemini_update_wait() continues it and returns the failure; a
 *           second gemini_update() would update twice
 *  @retval GEMINI_ERR_DEVICE  the device could not say what stream has queued so far; nothing changed. This,
 *           GEMINI_ERR_IO and GEMINI_ERR_FORMAT also say that an earlier update failed for good, as
 *           gemini_update_wait() tells: no other update is accepted. So does the status that a try_fn has returned
 *  After any other error, too, the update was not accepted and nothing changed.
 *
 *  With GEMINI_UPDATE_SPECULATE, alone, it changes nothing that the caller can see: workers run fn as for an update,
 *  but fn writes new values into host memory that is spare, and every byte, its tensor's state and what it holds stay
 *  as they are. An update with GEMINI_UPDATE_COMMIT, of the same arenas and modes, then takes these values over where
 *  it would run fn, without a copy. The caller promises that fn would compute the same there: for example gradients
 *  that are clipped after the backward pass are updated meanwhile as if they were not, and most often are not. The
 *  library only answers for the bytes that fn has read: what was speculated is dropped, for fn to be run instead, when
 *  anything (an acquire for writing, an update without COMMIT, gemini_zero(), gemini_load(), a graph) writes a chunk
 *  that it has read or is to write.
 *  - The unit is the span of an update of all elements on the device, the elements of one chunk of the arena with the
 *    smallest ones. What the call's range has of a unit only in part is not speculated, and is dropped when COMMIT's
 *    range has another part of it; the arenas' last unit ends with their last element.
 *  - Only units are speculated whose written chunks need no move: states that are read and written are on the host,
 *    and no chunk is pinned, acquired for writing, used by a graph, or waits for an update; and none whose states are
 *    on the device, too, where the plan updates them. Gradients are copied to the host. A reusing arena's gradients
 *    must all be written.
 *  - Spare is host memory within the budget that nothing has used in this iteration nor in the one before. It counts
 *    as used, and is given back when anything else needs room; the unit that was speculated last is dropped first.
 *  - With a file tier nothing is speculated. Sharded arenas: GEMINI_ERR_UNSUPPORTED.
 *  - A try_fn that fails, or device work before it that does, drops the unit and is no failure of the manager, unless
 *    the unit was taken over before.
 *  So the call returns GEMINI_OK whatever part of its range it speculates, and refuses what an update would refuse for
 *  its arguments. gemini_stats_t counts speculated, committed and dropped elements; the rest is speculated now. user
 *  stays borrowed, or copied (user_bytes), until fn has run for all spans, also of units that are dropped:
 *  gemini_update_wait() waits for that.
 *  With GEMINI_UPDATE_PASSES, beside any other flags, fn heeds gemini_update_span_t.pass. What the host updates late
 *  may then be computed twice, if a plan gains by it: first the parameters, for which operators wait, from states that
 *  stay as they are, and later the states, from the same gradients. user stays borrowed until gemini_update_wait(),
 *  whatever has been used since. The parameters alone may be speculated: COMMIT's fn computes the states. Since: 0.1 */
GEMINI_API gemini_status_t gemini_update(gemini_manager_t mgr, const gemini_update_t *update) GEMINI_MUST_CHECK;
/** Drops all that is speculated (GEMINI_UPDATE_SPECULATE) and not taken over. Its memory is free for others at once;
 *  its spans may still run, or not. Does not wait. Since: 0.1 */
GEMINI_API gemini_status_t gemini_update_drop(gemini_manager_t mgr) GEMINI_MUST_CHECK;
/** Blocks until all updates submitted so far are done. If one cannot continue, the rest of it stays pending; the
 *  message says how much that is, and gemini_stats_t.pending_updates counts it.
 *  @retval GEMINI_ERR_DEVICE  device work before an update failed, so that the update did not run; GEMINI_ERR_PEER, in
 *           the words of the group, if one has failed. This failure stays, and gemini_manager_close() returns it, too:
 *           the bytes of the model are not what they should be
 *  @retval GEMINI_ERR_IO, GEMINI_ERR_FORMAT  an update's chunks could not be read from their file, or are damaged there
 *  @retval GEMINI_ERR_OOM_HOST, GEMINI_ERR_OOM_FILE  there is no room for an update's chunks
 *  @retval other  what a gemini_update_try_fn has returned; the message names the elements
 *  What can be tried again stays pending and is tried again. What cannot stays pending, and gemini_manager_close()
 *  returns its failure, too. Since: 0.1 */
GEMINI_API gemini_status_t gemini_update_wait(gemini_manager_t mgr) GEMINI_MUST_CHECK;
/** @} */

/** @defgroup checkpoint Checkpoints
 *  @{ */
/** Saves what all arenas hold, and the states of their tensors, in the checkpoint files, for a later process to find.
 *  For several processes: gemini_group_checkpoint(). Acquired tensors are saved as HOLD. Pending updates are done
 *  first. Chunks that have not changed since they went to a file are not written again. If the process is killed at any
 *  time, the files have the previous checkpoint or this one, whole. The files need room for both until the call
 *  returns.
 *  @retval GEMINI_ERR_STATE  the manager was opened without checkpoint_name
 *  @retval GEMINI_ERR_BUSY  a range is acquired for writing
 *  @retval GEMINI_ERR_OOM_FILE, GEMINI_ERR_IO  the previous checkpoint stays
 *  Blocks. Since: 0.1 */
GEMINI_API gemini_status_t gemini_checkpoint(gemini_manager_t mgr) GEMINI_MUST_CHECK;
/** Takes up the last checkpoint in the checkpoint files. No byte is read before it is used. The caller must have made
 *  the same arenas and tensors, by name, kind and size; they must hold no bytes yet. chunk_bytes and file_dir must be
 *  the same.
 *  @retval GEMINI_ERR_NOT_FOUND  there is no checkpoint
 *  @retval GEMINI_ERR_FORMAT  the checkpoint is of other arenas or tensors: the message names one; nothing changed
 *  @retval GEMINI_ERR_STATE  the manager was opened without checkpoint_name; an arena holds bytes, is acquired or
 *           pinned, or an update of it is pending; or a checkpoint was made or taken up before; nothing changed
 *  @retval GEMINI_ERR_OOM_FILE  the checkpoint's chunks are more than the file budget; nothing changed
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_resume(gemini_manager_t mgr) GEMINI_MUST_CHECK;
/** @} */

/** @defgroup insight Statistics, plan, trace, timeline
 *  @{ */
/** Why a chunk moved. Later versions may have more reasons. */
enum {
  GEMINI_REASON_DEMAND = 0,   /* an acquire found the chunk in another tier */
  GEMINI_REASON_PLAN = 1,     /* the plan moved it ahead of time, or a graph fetched it in a replay */
  GEMINI_REASON_PRESSURE = 2, /* evicted to make room for an acquire or an allocation outside the plan */
  GEMINI_REASON_CALLER = 3,   /* hint, move, pin, budget change */
  GEMINI_REASON_UPDATE = 4,   /* an update, a norm, a load or a store needed it on the host */
  GEMINI_REASON_COUNT = 5     /* how many this version has */
};
/** All reasons, those of later versions included. */
#define GEMINI_REASON_ALL UINT32_MAX

typedef struct gemini_stats_s {
  uint32_t struct_size;    /* bytes; set by GEMINI_STATS_INIT; on return, bytes filled */
  uint32_t file_engine;    /* GEMINI_FILE_ENGINE_URING, _THREADS; _AUTO: there is no file tier */
  uint64_t model_bytes;    /* of all arenas, reused bytes once */
  uint64_t nonmodel_bytes; /* live allocations now */
  uint64_t nonmodel_peak_bytes;
  uint64_t chunk_bytes;
  uint64_t acquire_hits;        /* chunks that an acquire on the device found resident */
  uint64_t acquire_misses;      /* chunks that an acquire fetched itself */
  uint64_t stall_ns;            /* time that streams waited for chunks inside operators, in all */
  uint64_t iterations;          /* ended */
  uint64_t planned_iterations;  /* of these, run to their end under a plan */
  uint64_t departures;          /* iterations that left their plan */
  uint64_t plans;               /* made so far, and taken up again */
  uint64_t predicted_step_ns;   /* of the plan in force; 0 = none */
  uint64_t measured_step_ns;    /* last iteration, begin to begin or end */
  uint64_t planned_fetch_bytes; /* a step's fetches under the plan in force */
  uint64_t planned_evict_bytes; /* a step's write-backs under the plan in force */
  uint64_t op_peak_error_bytes; /* largest difference of predicted and actual non-model peak of an op, over all ops
                                    that began under a plan since the last gemini_stats_reset(); of iterations that
                                    write nothing, only what was above the prediction, and under a plan that moves
                                    nothing, only what was above the room that it leaves */
  uint64_t pending_updates;     /* parts of updates submitted and not done; those on the device count as one */
  uint64_t host_alloc_bytes;    /* live, of gemini_host_alloc() */
  uint64_t speculated_elements; /* whose new values were begun by GEMINI_UPDATE_SPECULATE */
  uint64_t committed_elements;  /* of these, taken over by an update with GEMINI_UPDATE_COMMIT */
  uint64_t dropped_elements;    /* of these, dropped */
} gemini_stats_t;
#define GEMINI_STATS_INIT { sizeof(gemini_stats_t), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
/** Copies the statistics. The call never waits, whatever other threads' calls wait for. While another call is under
 *  way, the figures may not all be of one moment.
 *  @param stats_out  allocated by the caller, struct_size set; borrowed until return
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_stats(gemini_manager_t mgr, gemini_stats_t *stats_out) GEMINI_MUST_CHECK;

typedef struct gemini_tier_stats_s {
  uint32_t struct_size; /* bytes; set by GEMINI_TIER_STATS_INIT; on return, bytes filled */
  uint32_t tier;        /* GEMINI_TIER_*, as asked for */
  uint64_t budget_bytes;
  uint64_t used_bytes; /* device: frames of chunks and of non-model memory */
  uint64_t peak_bytes; /* never below used_bytes */
} gemini_tier_stats_t;
#define GEMINI_TIER_STATS_INIT { sizeof(gemini_tier_stats_t), 0, 0, 0, 0 }
/** Copies the statistics of a tier. Never waits, as gemini_stats().
 *  @param tier      GEMINI_TIER_*
 *  @param stats_out allocated by the caller, struct_size set; borrowed until return
 *  @retval GEMINI_ERR_INVALID  there is no such tier. Since: 0.1 */
GEMINI_API gemini_status_t gemini_tier_stats(gemini_manager_t mgr, uint32_t tier, gemini_tier_stats_t *stats_out)
    GEMINI_MUST_CHECK;

typedef struct gemini_link_stats_s {
  uint32_t struct_size;    /* bytes; set by GEMINI_LINK_STATS_INIT; on return, bytes filled */
  uint32_t reason;         /* GEMINI_REASON_*, as asked for */
  uint32_t from_tier;      /* GEMINI_TIER_* */
  uint32_t to_tier;        /* GEMINI_TIER_* */
  uint32_t from_ordinal;   /* which GPU, where from_tier is the device; otherwise 0 */
  uint32_t to_ordinal;     /* which GPU, where to_tier is the device; otherwise 0 */
  uint64_t bw_bytes_per_s; /* measured with whole chunks, or else as configured; 0 = not known */
  uint64_t moved_bytes;    /* for that reason, since the last gemini_stats_reset() */
  uint64_t moved_chunks;
} gemini_link_stats_t;
#define GEMINI_LINK_STATS_INIT { sizeof(gemini_link_stats_t), 0, 0, 0, 0, 0, 0, 0, 0 }
/** How many links the manager moves chunks over; they are numbered from 0. A link has one direction. Later versions may
 *  have more of them, and others first: a caller looks at the ends of each, not at its number. Never waits.
 *  @param count_out links, which stay the same while the manager is open. Since: 0.1 */
GEMINI_API gemini_status_t gemini_link_count(gemini_manager_t mgr, uint32_t *count_out) GEMINI_MUST_CHECK;
/** Copies the statistics of a link. Never waits, as gemini_stats().
 *  @param link      below gemini_link_count()
 *  @param reason    GEMINI_REASON_*; GEMINI_REASON_ALL: the sum
 *  @param stats_out allocated by the caller, struct_size set; borrowed until return
 *  @retval GEMINI_ERR_INVALID  there is no such link or reason. Since: 0.1 */
GEMINI_API gemini_status_t gemini_link_stats(gemini_manager_t mgr, uint32_t link, uint32_t reason,
                                             gemini_link_stats_t *stats_out) GEMINI_MUST_CHECK;
/** The bytes of a range whose newest copy is in range->tier: the device where the device has it, otherwise the host,
 *  otherwise files. Bytes that nobody has written are nowhere.
 *  @param range     object, range and tier (any); mode is ignored; borrowed until return
 *  @retval GEMINI_ERR_INVALID  a value is out of range. Since: 0.1 */
GEMINI_API gemini_status_t gemini_tier_bytes(gemini_manager_t mgr, const gemini_access_t *range, uint64_t *bytes_out)
    GEMINI_MUST_CHECK;
/** Writes all statistics as text, one line for each figure of gemini_stats_t, gemini_tier_stats_t and
 *  gemini_link_stats_t, as "name: value" with the names of the fields: "iterations: 12", "device used_bytes: 65536",
 *  "device to host moved_bytes: 0", "device to host plan moved_bytes: 0" (by reason, where it is not 0). Later versions
 *  may have more lines. Never waits, as gemini_stats(). The text always ends with a NUL.
 *  @param size_bytes  room in text_out, with the NUL; 0 to ask for the length
 *  @param text_out  receives the text; may be NULL with size_bytes 0
 *  @param length_out  bytes that the text has without the NUL, a different number next time; may be NULL
 *  @retval GEMINI_ERR_INVALID  text_out is NULL and size_bytes is not 0
 *  @retval GEMINI_ERR_OOM_SYSTEM  there is no memory for the text
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_stats_text(gemini_manager_t mgr, uint64_t size_bytes, char *text_out,
                                             uint64_t *length_out) GEMINI_MUST_CHECK;
/** Starts the peaks of tiers and of non-model memory, moved_bytes and moved_chunks of links, acquire_hits,
 *  acquire_misses, stall_ns, departures and op_peak_error_bytes again from now. A peak starts at what is in use; all
 *  other figures stay. Since: 0.1 */
GEMINI_API gemini_status_t gemini_stats_reset(gemini_manager_t mgr) GEMINI_MUST_CHECK;

/** Writes the manager's state in words, for people: what is used in each tier, which chunks are where, which operator
 *  is open, what is acquired and how often, and which threads wait inside the library, for what and since when. For
 *  each group: which rank this is; how many gathers and sums were queued, which of them have not ended, and what the
 *  first of these is for; for each of its arenas how many chunks are gathered and have not arrived, how many chunks of
 *  gradients were added in this round, and in which tiers this rank's slices are. The call never waits for another one:
 *  if another thread holds the manager and is in no wait, all but figures, streams, ranks and waits is left out, and
 *  the text says so. The text always ends with a NUL.
 *  @param size_bytes  room in text_out, with the NUL; 0 to ask for the length
 *  @param text_out  receives the text; may be NULL with size_bytes 0
 *  @param length_out  bytes that the text has without the NUL, a different number next time; may be NULL
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_manager_dump(gemini_manager_t mgr, uint64_t size_bytes, char *text_out,
                                               uint64_t *length_out) GEMINI_MUST_CHECK;

/** Writes the plan in force in words: what stays, what moves, what limits the step's time. The text always ends with a
 *  NUL.
 *  @param size_bytes  room in text_out, with the NUL; 0 to ask for the length
 *  @param text_out  receives the text; may be NULL with size_bytes 0
 *  @param length_out  bytes that the text has without the NUL; may be NULL
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_plan_explain(gemini_manager_t mgr, uint64_t size_bytes, char *text_out,
                                               uint64_t *length_out) GEMINI_MUST_CHECK;
/** Writes the record of the last complete iteration, its trace, to a text file (docs/trace.md).
 *  @retval GEMINI_ERR_STATE  no iteration is complete yet
 *  @retval GEMINI_ERR_IO, GEMINI_ERR_OOM_FILE  writing failed, or the disk, a quota or the limit on file sizes is
 *           exhausted; native_code is errno
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_trace_save(gemini_manager_t mgr, const char *path) GEMINI_MUST_CHECK;
/** Reads a saved trace and plans from it, in place of a warm-up. The caller's arenas must be those of the trace, by
 *  name and size.
 *  @retval GEMINI_ERR_OOM_DEVICE  an operator's working set does not fit: the message names the operator and the bytes
 *           that it lacks. Arenas that had no chunk size yet have one now; nothing else changed
 *  @retval GEMINI_ERR_STATE  an iteration is open
 *  @retval GEMINI_ERR_FORMAT  the file is no trace, or is a trace of other arenas
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_trace_load(gemini_manager_t mgr, const char *path) GEMINI_MUST_CHECK;
/** Starts recording a timeline. gemini_timeline_stop() or gemini_manager_close() writes it to path as Chrome trace
 *  JSON, which ui.perfetto.dev opens. Since: 0.1 */
GEMINI_API gemini_status_t gemini_timeline_start(gemini_manager_t mgr, const char *path) GEMINI_MUST_CHECK;
/** Ends the recording and writes the timeline. Blocks until the recorded work is done.
 *  @retval GEMINI_ERR_STATE  no timeline is being recorded
 *  @retval GEMINI_ERR_IO, GEMINI_ERR_OOM_FILE  as for gemini_trace_save(); the recording has ended
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_timeline_stop(gemini_manager_t mgr) GEMINI_MUST_CHECK;
/** @} */

#ifdef __cplusplus
}
#endif
#endif

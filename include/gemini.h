/* libgemini: memory management for models larger than the GPU.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Conventions, valid for every declaration below:
 * - A function that can fail returns gemini_status_t: GEMINI_OK or a negative GEMINI_ERR_*. On failure nothing
 *   has changed, results named *_out are untouched, and gemini_last_error() tells this thread what went wrong.
 * - Handles are 64-bit values, never pointers to follow. 0 is no handle. A handle that is of another kind, of
 *   another manager, or already destroyed is refused with GEMINI_ERR_HANDLE.
 * - Sizes and offsets are bytes unless the name says elements. Times are nanoseconds.
 * - A call that needs room in a tier can return GEMINI_ERR_OOM_DEVICE, GEMINI_ERR_OOM_HOST or GEMINI_ERR_OOM_FILE: the
 *   one that is full may lie below the one where the room is needed, as what leaves must go somewhere.
 * - Functions may be called from any thread unless their comment says otherwise. Functions that take a stream
 *   never wait for the work queued on it, unless the stream is GEMINI_STREAM_CALLER or the comment says "blocks".
 * - After fork(), the child has none of its parent's managers: calls with their handles, closing included, are refused
 *   with GEMINI_ERR_HANDLE and name the parent; their memory is not there: touching it faults, until the child maps
 *   something else at the same addresses; their files are the parent's alone. The child can open managers of its own,
 *   but none on CUDA where the parent has used CUDA, whose driver does not work in forked processes. Topologies go on
 *   in both.
 * - Caller-allocated structs start with struct_size; use the GEMINI_*_INIT macros. A zero field means the default.
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

/** The version of the library that is loaded, "MAJOR.MINOR.PATCH"; static storage. Since: 0.1 */
GEMINI_API const char *gemini_version(void);
/** @} */

/** @defgroup errors Errors
 *  @{ */
typedef int32_t gemini_status_t;
enum {
  GEMINI_OK = 0,
  GEMINI_ERR_INVALID = -1,      /* an argument is out of its range; the message names value and limit */
  GEMINI_ERR_HANDLE = -2,       /* a handle is unknown, destroyed, of another kind or another manager */
  GEMINI_ERR_STATE = -3,        /* the call is out of order, or an illegal tensor-state transition */
  GEMINI_ERR_BUSY = -4,         /* the object is acquired, pinned or in use elsewhere */
  GEMINI_ERR_OOM_DEVICE = -5,   /* the device budget is exhausted and nothing evictable is left */
  GEMINI_ERR_OOM_HOST = -6,     /* the host budget is exhausted and nothing can move to files */
  GEMINI_ERR_OOM_FILE = -7,     /* the file budget, or the disk, is exhausted */
  GEMINI_ERR_OOM_SYSTEM = -8,   /* the process could not get memory for the library's own records */
  GEMINI_ERR_IO = -9,           /* reading or writing a file failed; native_code is errno */
  GEMINI_ERR_FORMAT = -10,      /* a file is not what it should be; the message names the line or offset */
  GEMINI_ERR_NOT_FOUND = -11,   /* no object has this name */
  GEMINI_ERR_EXISTS = -12,      /* the name is taken */
  GEMINI_ERR_UNSUPPORTED = -13, /* this build or device cannot do that */
  GEMINI_ERR_DEVICE = -14,      /* the device reported an error; native_code is its code */
  GEMINI_ERR_PENDING = -15      /* the call was accepted and its work is not done yet; the message says why */
};

/** A status in words; static storage, never NULL. Since: 0.1 */
GEMINI_API const char *gemini_status_string(gemini_status_t status);

typedef struct gemini_error_info {
  uint32_t struct_size;   /* bytes; set by GEMINI_ERROR_INFO_INIT */
  gemini_status_t status; /* of this thread's last failed call */
  int64_t native_code;    /* errno or the device's code; 0 when there is none */
  char operation[64];     /* public function that failed */
  char message[440];      /* what happened: which value, which limit */
} gemini_error_info_t;
#define GEMINI_ERROR_INFO_INIT { sizeof(gemini_error_info_t), 0, 0, "", "" }

/** Copies the record of this thread's last failed call. A success does not clear it.
 *  @param info_out caller-allocated; struct_size set
 *  @retval GEMINI_OK, or GEMINI_ERR_INVALID when info_out is NULL or its size is out of range
 *  Threads: any; the record is per thread. Since: 0.1 */
GEMINI_API gemini_status_t gemini_last_error(gemini_error_info_t *info_out);
/** Makes info the record of this thread's last failed call, for libraries that are built on this one (libgemini_update
 *  is one): their callers then find every error text in one place. Ends operation and message with a null byte if they
 *  have none.
 *  @param info status negative; struct_size set; copied
 *  @retval GEMINI_OK, or GEMINI_ERR_INVALID when info is NULL, its size is out of range, or its status is no error; the
 *          record then is of this call
 *  Threads: any; the record is per thread. Since: 0.1 */
GEMINI_API gemini_status_t gemini_error_set(const gemini_error_info_t *info);
/** @} */

/** @defgroup manager Managers
 *  @{ */
typedef uint64_t gemini_manager_t;
typedef uint64_t gemini_arena_t;
typedef uint64_t gemini_tensor_t;
typedef uint64_t gemini_stream_t;

/** The stream that is the calling thread itself: work is done by the caller, at once, so an acquire on it blocks
 *  until the bytes are there. */
#define GEMINI_STREAM_CALLER ((gemini_stream_t)0)

enum { GEMINI_TIER_DEVICE = 0, GEMINI_TIER_HOST = 1, GEMINI_TIER_FILE = 2, GEMINI_TIER_COUNT = 3 };
enum {
  GEMINI_PLACEMENT_AUTO = 0,  /* chosen by predicted step time */
  GEMINI_PLACEMENT_CUDA = 1,  /* as much as fits stays on the device, the rest comes and goes */
  GEMINI_PLACEMENT_CPU = 2,   /* everything lives below the device and visits it for one op */
  GEMINI_PLACEMENT_STATIC = 3 /* the given fractions stay on the device, the rest as under CPU */
};
enum { GEMINI_DEVICE_SIMULATED = 0, GEMINI_DEVICE_CUDA = 1 };
enum {
  GEMINI_FILE_ENGINE_AUTO = 0,   /* io_uring, or where the system forbids it, threads */
  GEMINI_FILE_ENGINE_URING = 1,  /* opening fails where it is forbidden */
  GEMINI_FILE_ENGINE_THREADS = 2 /* pread and pwrite */
};
enum { GEMINI_LOG_ERROR = 1, GEMINI_LOG_WARNING = 2, GEMINI_LOG_INFO = 3, GEMINI_LOG_DEBUG = 4 };
enum {
  GEMINI_CONFIG_STRICT = 1 /* unmap an evicted chunk at once, waiting for its users, so that a stale access faults */
};

/** @param level GEMINI_LOG_*  @param message borrowed until return; no newline at its end
 *  Called from any thread, never while the library holds a lock; must not call the library. */
typedef void (*gemini_log_fn)(void *user, int32_t level, const char *message);

typedef struct gemini_config {
  uint32_t struct_size;         /* bytes; set by GEMINI_CONFIG_INIT */
  uint32_t flags;               /* GEMINI_CONFIG_*; unknown bits: GEMINI_ERR_INVALID */
  uint32_t placement;           /* GEMINI_PLACEMENT_* */
  uint32_t device;              /* GEMINI_DEVICE_* */
  uint32_t device_ordinal;      /* which GPU; 0 on the simulated device */
  uint32_t warmup_iterations;   /* recorded before the first plan; 0 = 1, at most 1000 */
  uint32_t update_threads;      /* workers for updates and norms on the host; 0 = cores - 1, at least 1, at most 256 */
  uint32_t log_level;           /* most verbose level delivered; 0 = GEMINI_LOG_WARNING */
  uint64_t device_bytes;        /* device budget, model and non-model data; required */
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
  gemini_log_fn log_fn;         /* NULL: silent; stderr where GEMINI_LOG is error, warning, info or debug */
  void *log_user;               /* passed to log_fn */
  uint32_t file_engine;         /* GEMINI_FILE_ENGINE_* */
  uint32_t reserved;            /* 0 */
  const char *checkpoint_name;  /* the file tier's files are kept under this name, for gemini_checkpoint(); needs
                                   chunk_bytes; borrowed. NULL: they vanish with the process */
  uint64_t watchdog_ns; /* a call that waits for longer, for queued work, transfers, workers, the system or another
                                   call, is logged as a warning that says for what; again at twice that time, and so on.
                                   Needs log_fn; 0: no watchdog */
} gemini_config_t;
#define GEMINI_CONFIG_INIT \
  { sizeof(gemini_config_t), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0, NULL, NULL, NULL, 0, 0, NULL, 0 }

/** Opens a manager: one device, one set of budgets, one sequence of iterations.
 *  @param config  borrowed until return
 *  @param mgr_out transferred to the caller; end with gemini_manager_close()
 *  @retval GEMINI_ERR_INVALID      a field is out of range
 *  @retval GEMINI_ERR_UNSUPPORTED  the device is not available in this build or on this machine
 *  @retval GEMINI_ERR_OOM_SYSTEM, GEMINI_ERR_IO  a reservation failed
 *  At most 64 managers exist at once. Since: 0.1 */
GEMINI_API gemini_status_t gemini_manager_open(const gemini_config_t *config, gemini_manager_t *mgr_out)
    GEMINI_MUST_CHECK;

/** Finishes pending updates, waits for the manager's streams and frees everything it owns. 0 is accepted.
 *  @retval GEMINI_ERR_BUSY  something is still acquired; nothing changed
 *  @retval GEMINI_ERR_HANDLE  no such manager
 *  A stored asynchronous failure is returned after everything has been freed. Blocks.
 *  Threads: no other call on this manager may run. Since: 0.1 */
GEMINI_API gemini_status_t gemini_manager_close(gemini_manager_t mgr);

/** Changes a tier's budget now; a smaller one evicts first. Allowed between iterations and inside them.
 *  @param tier GEMINI_TIER_*
 *  @retval GEMINI_ERR_OOM_DEVICE, GEMINI_ERR_OOM_HOST, GEMINI_ERR_OOM_FILE  what the tier must keep does not fit
 *          in the new budget, or the plan cannot be made with it; the message names both; the old budget stays
 *  @retval GEMINI_ERR_IO  a chunk that must leave could not be written to its file; the old budget stays
 *  Blocks while chunks leave a shrinking tier. Since: 0.1 */
GEMINI_API gemini_status_t gemini_budget_set(gemini_manager_t mgr, uint32_t tier, uint64_t bytes) GEMINI_MUST_CHECK;
/** @} */

/** @defgroup streams Streams
 *  In-order queues of device work. On the simulated device a stream is a thread.
 *  @{ */
/** @param stream_out transferred to the caller; end with gemini_stream_destroy(). At most 48 at once. Since: 0.1 */
GEMINI_API gemini_status_t gemini_stream_create(gemini_manager_t mgr, gemini_stream_t *stream_out) GEMINI_MUST_CHECK;
/** Makes a stream of the caller's own one of the manager's: a cudaStream_t or CUstream of the GPU's primary context;
 *  NULL is its default stream. It stays the caller's and must outlive the handle, whose destruction leaves it as it is.
 *  @param stream_out as of gemini_stream_create()
 *  @retval GEMINI_ERR_UNSUPPORTED  the simulated device has no such streams. Since: 0.1 */
GEMINI_API gemini_status_t gemini_stream_adopt(gemini_manager_t mgr, void *native, gemini_stream_t *stream_out)
    GEMINI_MUST_CHECK;
/** The stream as the GPU's own API names it, for work that the caller queues.
 *  @retval GEMINI_ERR_UNSUPPORTED  the simulated device has no such streams. Since: 0.1 */
GEMINI_API gemini_status_t gemini_stream_native(gemini_manager_t mgr, gemini_stream_t stream, void **native_out)
    GEMINI_MUST_CHECK;
/** Waits for the stream's work, then destroys it. 0 is accepted. Blocks.
 *  @retval GEMINI_ERR_BUSY    the open operator runs on it; nothing changed
 *  @retval GEMINI_ERR_STATE   it is being captured; nothing changed
 *  @retval GEMINI_ERR_DEVICE  its work cannot be waited for; it stays, until the manager is closed. Since: 0.1 */
GEMINI_API gemini_status_t gemini_stream_destroy(gemini_stream_t stream);

typedef void (*gemini_call_fn)(void *user);
/** Queues fn(user) behind the stream's earlier work; on GEMINI_STREAM_CALLER it runs before this returns.
 *  @param mgr  the stream's manager
 *  @param user borrowed until fn has run; fn must not call the library, except gemini_version(),
 *              gemini_status_string() and gemini_last_error()
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_stream_call(gemini_manager_t mgr, gemini_stream_t stream, gemini_call_fn fn,
                                              void *user) GEMINI_MUST_CHECK;
/** Blocks until everything queued on the stream so far is done; returns the stream's stored failure, if any.
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_stream_synchronize(gemini_manager_t mgr, gemini_stream_t stream) GEMINI_MUST_CHECK;
/** @} */

/** @defgroup arenas Arenas and tensors
 *  An arena is a range of device addresses reserved for life. Tensors lie in it one after another and never move.
 *  The arena is cut into chunks of one size, the chunks; a chunk is what becomes resident and moves.
 *  Bytes that nobody has written read as zero.
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
  uint32_t flags;          /* 0 */
  uint64_t capacity_bytes; /* address range to reserve; costs no memory; 0 = the sum of the three budgets */
  const char *name;        /* at most 63 bytes; NULL = after its kind; borrowed until return */
  gemini_arena_t like;     /* 0, or an arena whose layout in elements this one follows: a tensor registered there
                              has its counterpart here (gemini_tensor_counterpart) */
  gemini_arena_t reuse;    /* 0, or (kind GRAD) a parameter arena whose bytes this one shares: a gradient takes the
                              place of its parameter until the parameter is written again. Needs the same
                              element_bytes; implies like. Bytes that are in no tensor, between two gradients at most
                              4,096 bytes apart, become zero with them: keep other ranges in other arenas */
} gemini_arena_config_t;
#define GEMINI_ARENA_CONFIG_INIT { sizeof(gemini_arena_config_t), 0, 0, 0, 0, NULL, 0, 0 }

/** Reserves an arena.
 *  @param arena_out transferred to the caller; end with gemini_arena_destroy() or gemini_manager_close()
 *  @retval GEMINI_ERR_INVALID  a field is out of range, or like/reuse do not fit
 *  @retval GEMINI_ERR_OOM_SYSTEM  no address range of that size is left
 *  At most 1,024 arenas exist at once in a manager. Since: 0.1 */
GEMINI_API gemini_status_t gemini_arena_create(gemini_manager_t mgr, const gemini_arena_config_t *config,
                                               gemini_arena_t *arena_out) GEMINI_MUST_CHECK;

/** Drops an arena, its tensors and its bytes. 0 is accepted. Parameters whose bytes gradients in a reusing arena had
 *  taken read as zero when that arena goes.
 *  @retval GEMINI_ERR_BUSY  a tensor or range of it is acquired or pinned, or another arena follows or reuses it
 *  @retval GEMINI_ERR_OOM_HOST, GEMINI_ERR_OOM_FILE  there is no room to make zeros of what gradients had taken in part
 *                           of a chunk, or to finish an update that waits for room
 *  Blocks until copies and updates that touch it are done. Since: 0.1 */
GEMINI_API gemini_status_t gemini_arena_destroy(gemini_manager_t mgr, gemini_arena_t arena);

typedef struct gemini_arena_info_s {
  uint32_t struct_size; /* bytes; set by GEMINI_ARENA_INFO_INIT */
  uint32_t kind;        /* GEMINI_KIND_* */
  uint64_t base;        /* device address of its first byte */
  uint64_t size_bytes;  /* used so far: end of the last tensor or reserved range */
  uint64_t capacity_bytes;
  uint64_t chunk_bytes;                   /* 0 before the size is chosen (the first access or iteration) */
  uint64_t tier_bytes[GEMINI_TIER_COUNT]; /* bytes of its chunks whose newest copy is in this tier */
  uint64_t tensor_count;
} gemini_arena_info_t;
#define GEMINI_ARENA_INFO_INIT { sizeof(gemini_arena_info_t), 0, 0, 0, 0, 0, { 0, 0, 0 }, 0 }
/** What an arena is and where its bytes are.
 *  @param info_out caller-allocated; struct_size set; borrowed until return. Since: 0.1 */
GEMINI_API gemini_status_t gemini_arena_info(gemini_manager_t mgr, gemini_arena_t arena, gemini_arena_info_t *info_out)
    GEMINI_MUST_CHECK;

/** Takes the next size_bytes of an arena as one plain range, for callers who do their own pointer arithmetic.
 *  @param offset_out byte offset in the arena, a multiple of 256 elements
 *  @retval GEMINI_ERR_INVALID  size_bytes is 0, no multiple of element_bytes, or more than the arena has left
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_arena_take(gemini_manager_t mgr, gemini_arena_t arena, uint64_t size_bytes,
                                             uint64_t *offset_out) GEMINI_MUST_CHECK;

#define GEMINI_OFFSET_NEXT UINT64_MAX
/** Registers a tensor.
 *  @param arena        an arena that is neither like nor reusing another
 *  @param name         1..127 bytes, unique in the manager; copied
 *  @param size_bytes   a multiple of the arena's element_bytes, not 0
 *  @param offset_bytes GEMINI_OFFSET_NEXT: the arena's next free place, a multiple of 256 elements. Otherwise a
 *                      place inside ranges taken before; tensors may overlap (tied weights)
 *  @param tensor_out   transferred to the caller; end with gemini_tensor_unregister() or with its arena
 *  @retval GEMINI_ERR_EXISTS  the name is taken
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_tensor_register(gemini_manager_t mgr, gemini_arena_t arena, const char *name,
                                                  uint64_t size_bytes, uint64_t offset_bytes,
                                                  gemini_tensor_t *tensor_out) GEMINI_MUST_CHECK;
/** Forgets a tensor; its bytes stay in the arena. 0 is accepted.
 *  @retval GEMINI_ERR_BUSY  it, or a counterpart, is acquired. Since: 0.1 */
GEMINI_API gemini_status_t gemini_tensor_unregister(gemini_manager_t mgr, gemini_tensor_t tensor);
/** @retval GEMINI_ERR_NOT_FOUND  no tensor has this name. Since: 0.1 */
GEMINI_API gemini_status_t gemini_tensor_find(gemini_manager_t mgr, const char *name, gemini_tensor_t *tensor_out)
    GEMINI_MUST_CHECK;
/** The tensor of the same elements in an arena that is like (or reuses) the tensor's arena. Since: 0.1 */
GEMINI_API gemini_status_t gemini_tensor_counterpart(gemini_manager_t mgr, gemini_tensor_t tensor, gemini_arena_t arena,
                                                     gemini_tensor_t *tensor_out) GEMINI_MUST_CHECK;

/** Tensor states. Legal transitions (docs/states.md has the table with its reasons):
 *  FREE -> HOLD, COMPUTE; HOLD -> FREE, COMPUTE, READY_FOR_REDUCE; COMPUTE -> HOLD, HOLD_AFTER_FWD, HOLD_AFTER_BWD;
 *  HOLD_AFTER_FWD -> HOLD, COMPUTE; HOLD_AFTER_BWD -> HOLD, COMPUTE, READY_FOR_REDUCE;
 *  READY_FOR_REDUCE -> HOLD, COMPUTE. */
enum {
  GEMINI_STATE_FREE = 0,             /* no bytes yet: reads as zero, holds no memory */
  GEMINI_STATE_HOLD = 1,             /* has bytes, nobody uses them */
  GEMINI_STATE_HOLD_AFTER_FWD = 2,   /* as HOLD; last used in a forward phase */
  GEMINI_STATE_HOLD_AFTER_BWD = 3,   /* as HOLD; last used in a backward phase */
  GEMINI_STATE_COMPUTE = 4,          /* acquired; must not move */
  GEMINI_STATE_READY_FOR_REDUCE = 5, /* its gradient is complete */
  GEMINI_STATE_COUNT = 6
};
/** Moves a tensor to HOLD, READY_FOR_REDUCE or FREE (which drops its bytes lazily). COMPUTE is entered by acquire
 *  and left by release only.
 *  @retval GEMINI_ERR_STATE  the transition is not in the table; nothing changed
 *  @retval GEMINI_ERR_OOM_HOST, GEMINI_ERR_DEVICE  of FREE: as of gemini_zero(). Since: 0.1 */
GEMINI_API gemini_status_t gemini_tensor_state_set(gemini_manager_t mgr, gemini_tensor_t tensor, uint32_t state)
    GEMINI_MUST_CHECK;

typedef struct gemini_tensor_info_s {
  uint32_t struct_size; /* bytes; set by GEMINI_TENSOR_INFO_INIT */
  uint32_t state;       /* GEMINI_STATE_* */
  uint64_t address;     /* device address; never changes */
  uint64_t size_bytes;
  uint64_t offset_bytes; /* in its arena */
  gemini_arena_t arena;
  uint64_t users;                         /* acquires not yet released */
  uint64_t tier_bytes[GEMINI_TIER_COUNT]; /* its bytes by the tier of their newest copy */
  char name[128];                         /* of a counterpart: the registered tensor's name */
} gemini_tensor_info_t;
#define GEMINI_TENSOR_INFO_INIT { sizeof(gemini_tensor_info_t), 0, 0, 0, 0, 0, 0, { 0, 0, 0 }, "" }
/** What a tensor is, its state, and where its bytes are.
 *  @param info_out caller-allocated; struct_size set; borrowed until return. Since: 0.1 */
GEMINI_API gemini_status_t gemini_tensor_info(gemini_manager_t mgr, gemini_tensor_t tensor,
                                              gemini_tensor_info_t *info_out) GEMINI_MUST_CHECK;
/** @} */

/** @defgroup brackets Iterations, phases, operators
 *  One iteration is one training step. The tracer learns an iteration's operators in their order; a later iteration
 *  that does otherwise is served on demand and planned for. Brackets may be set from any thread, one at a time.
 *  @{ */
enum { GEMINI_PHASE_NONE = 0, GEMINI_PHASE_FORWARD = 1, GEMINI_PHASE_BACKWARD = 2, GEMINI_PHASE_UPDATE = 3 };
/** @retval GEMINI_ERR_STATE  an iteration is open already. Since: 0.1 */
GEMINI_API gemini_status_t gemini_iteration_begin(gemini_manager_t mgr) GEMINI_MUST_CHECK;
/** Ends the iteration. When warm-up ends with it, or it departed from what was known, the next plan is made here.
 *  Blocks until the iteration's ops are done while it is still being learned (in warm-up, or after a departure).
 *  @retval GEMINI_ERR_STATE       no iteration is open, or an op is
 *  @retval GEMINI_ERR_OOM_DEVICE  an op's working set does not fit: the message names the op and the bytes it
 *          lacks. The iteration has ended; the next ones are served on demand. Since: 0.1 */
GEMINI_API gemini_status_t gemini_iteration_end(gemini_manager_t mgr) GEMINI_MUST_CHECK;
/** @param phase GEMINI_PHASE_*; between ops. Since: 0.1 */
GEMINI_API gemini_status_t gemini_phase_set(gemini_manager_t mgr, uint32_t phase) GEMINI_MUST_CHECK;
/** Opens an operator. Inside it, acquires and allocations are its own.
 *  @param name   1..127 bytes; copied; the same operator should have the same name in every iteration
 *  @param stream where its work is queued
 *  @retval GEMINI_ERR_STATE  no iteration is open, or an op is. Since: 0.1 */
GEMINI_API gemini_status_t gemini_op_begin(gemini_manager_t mgr, const char *name, gemini_stream_t stream)
    GEMINI_MUST_CHECK;
/** Closes the operator; what was acquired in it may be released later. Since: 0.1 */
GEMINI_API gemini_status_t gemini_op_end(gemini_manager_t mgr) GEMINI_MUST_CHECK;
/** @} */

/** @defgroup access Acquire and release
 *  @{ */
enum {
  GEMINI_READ = 1,
  GEMINI_WRITE = 2, /* without READ: every byte of the range will be written, so its old bytes need not come */
  GEMINI_READ_WRITE = 3
};
typedef struct gemini_access {
  uint64_t object;       /* a tensor, or an arena */
  uint64_t offset_bytes; /* in the object */
  uint64_t size_bytes;   /* 0 with offset 0: the whole tensor, or all of the arena used so far (at this call: a release
                            names the size it was acquired with when the arena has grown since) */
  uint32_t mode;         /* GEMINI_READ, GEMINI_WRITE, GEMINI_READ_WRITE */
  uint32_t tier;         /* GEMINI_TIER_DEVICE or GEMINI_TIER_HOST: where the bytes are wanted */
  void *ptr;             /* out: first byte of the range, valid until release. On the device it is the range's
                            address for life, on the host it may differ next time */
} gemini_access_t;

/** Makes a batch of ranges usable, all or none.
 *  On the device: work queued on the stream after this call sees the bytes. On the host: blocks until they are there.
 *  @param accesses borrowed; ptr of each is written on success
 *  @param count    0..2^20
 *  @retval GEMINI_ERR_BUSY        one range is acquired on the host for writing and wanted on the device, or the
 *                                 other way round
 *  @retval GEMINI_ERR_STATE       reading a parameter whose bytes its gradient has taken, or the other way round;
 *                                 writing both in one batch
 *  @retval GEMINI_ERR_OOM_DEVICE, GEMINI_ERR_OOM_HOST  the batch does not fit beside what is acquired, pinned and
 *                                 allocated; the message says what holds the memory
 *  @retval GEMINI_ERR_IO          a chunk could not be read from its file
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_acquire(gemini_manager_t mgr, gemini_access_t *accesses, uint64_t count,
                                          gemini_stream_t stream) GEMINI_MUST_CHECK;
/** Ends the use of ranges acquired before, after the stream's work queued so far. Object, range, mode and tier must
 *  be those of the acquire; ptr is ignored on the device and must be the acquired one on the host.
 *  @retval GEMINI_ERR_STATE  one of the ranges is not acquired. Since: 0.1 */
GEMINI_API gemini_status_t gemini_release(gemini_manager_t mgr, const gemini_access_t *accesses, uint64_t count,
                                          gemini_stream_t stream) GEMINI_MUST_CHECK;
/** Brings ranges to their tier (DEVICE, HOST or FILE) soon; takes free memory only, never evicts for it, and has no
 *  effect where there is none. mode is ignored. Since: 0.1 */
GEMINI_API gemini_status_t gemini_hint(gemini_manager_t mgr, const gemini_access_t *accesses, uint64_t count)
    GEMINI_MUST_CHECK;
/** Moves ranges to their tier (DEVICE, HOST or FILE) now, evicting for it where needed; chunks are moved whole.
 *  Leaving the device is queued behind the work that uses the chunk. mode is ignored.
 *  @retval GEMINI_ERR_BUSY  a chunk is acquired or pinned where it must leave. Since: 0.1 */
GEMINI_API gemini_status_t gemini_move(gemini_manager_t mgr, const gemini_access_t *accesses, uint64_t count)
    GEMINI_MUST_CHECK;
/** Brings a range to the device and keeps it there until unpinned. Pins nest. Since: 0.1 */
GEMINI_API gemini_status_t gemini_pin(gemini_manager_t mgr, const gemini_access_t *access) GEMINI_MUST_CHECK;
/** @retval GEMINI_ERR_STATE  a chunk of the range is not pinned. Since: 0.1 */
GEMINI_API gemini_status_t gemini_unpin(gemini_manager_t mgr, const gemini_access_t *access) GEMINI_MUST_CHECK;
/** @} */

/** @defgroup graphs CUDA graphs
 *  A range of operators, captured once into a CUDA graph of the caller's and replayed with one launch, though its
 *  chunks do not fit beside each other on the device: the graph itself copies them from host memory into frames set
 *  aside for it, which they take in turns, each as soon as what had its frame before is done, beside the kernels.
 *
 *      gemini_graph_begin(mgr, stream, bytes, &graph);
 *      cuStreamBeginCapture(native, ...);
 *      for each operator: gemini_acquire(mgr, what it reads, ..., stream); its kernels; gemini_release(...);
 *      cuStreamEndCapture(native, ...);
 *      gemini_graph_end(mgr, graph);
 *      for each replay: gemini_graph_enter(mgr, graph, stream); cuGraphLaunch(...); gemini_graph_leave(mgr, graph);
 *
 *  Chunks that a capture writes, and others that shall stay for all of it, are acquired before it begins and released
 *  after it ends, on the device, and likewise around each replay. The others are read only. Between replays they live
 *  as all chunks do, except that their places in host memory stay theirs while the graph lives.
 *  @{ */
typedef uint64_t gemini_graph_t;
/** Sets device memory aside for a graph that is about to be captured of a stream; evicts chunks for it. What a capture
 *  acquires and releases on this stream until gemini_graph_end() is read by the graph: the copies that it needs get
 *  into the capture, and nothing is computed or brought now. gemini_op_begin() and gemini_op_end() on a stream that is
 *  captured so give names to messages, and nothing else.
 *  @param device_bytes for chunks that take turns; whole chunks of it count. A replay overlaps copies with kernels
 *                      where it holds more than one operator's chunks
 *  @param graph_out    transferred to the caller; end with gemini_graph_destroy() or gemini_manager_close(). At most
 *                      256 exist at once
 *  @retval GEMINI_ERR_UNSUPPORTED  the simulated device has no graphs
 *  @retval GEMINI_ERR_STATE        the stream is being captured already, or another graph was begun on it and not ended
 *  @retval GEMINI_ERR_INVALID      device_bytes is less than a chunk, stream is GEMINI_STREAM_CALLER, or 256 exist
 *  @retval GEMINI_ERR_OOM_DEVICE   they are not to be had beside what is acquired, pinned and allocated, or the plan
 *                                  cannot be made with what they leave. Since: 0.1 */
GEMINI_API gemini_status_t gemini_graph_begin(gemini_manager_t mgr, gemini_stream_t stream, uint64_t device_bytes,
                                              gemini_graph_t *graph_out) GEMINI_MUST_CHECK;
/** Says that the capture has ended. Ranges still acquired in it are released.
 *  @retval GEMINI_ERR_STATE  the stream is still being captured, the graph has ended already, or the device refused a
 *                            part of the capture, of which an acquire or release has told: then it can only be
 *                            destroyed. Since: 0.1 */
GEMINI_API gemini_status_t gemini_graph_end(gemini_manager_t mgr, gemini_graph_t graph) GEMINI_MUST_CHECK;
/** Before each launch, on the stream where it will be: makes the stream wait until host memory has the newest bytes of
 *  all that the graph reads (updates done, device copies written back), and keeps others from these chunks: until
 *  gemini_graph_leave() they cannot be acquired on the device, nor on the host for writing. Of a range of operators
 *  that changes nothing this costs a look at each chunk.
 *  @retval GEMINI_ERR_BUSY   one of them is acquired on the device, or for writing, pinned, or in use by another graph
 *  @retval GEMINI_ERR_STATE  the capture has not ended, it is entered already, a chunk that was acquired while it was
 *                            captured is not acquired now, or a parameter's bytes are its gradient's, or the other way
 *                            round
 *  @retval GEMINI_ERR_IO     a chunk could not be read from its file
 *  Blocks where a chunk that was on the device since its last replay has to leave it, or to come from a file. Since:
 *  0.1 */
GEMINI_API gemini_status_t gemini_graph_enter(gemini_manager_t mgr, gemini_graph_t graph, gemini_stream_t stream)
    GEMINI_MUST_CHECK;
/** After the launch: the chunks are free again for who comes after what is queued on the stream of
 *  gemini_graph_enter().
 *  @retval GEMINI_ERR_STATE  it is not entered, or that stream is being captured. Since: 0.1 */
GEMINI_API gemini_status_t gemini_graph_leave(gemini_manager_t mgr, gemini_graph_t graph) GEMINI_MUST_CHECK;
/** Gives the device memory back, behind the last replay. The CUDA graph, which is the caller's, must not be launched
 *  any more. 0 is accepted.
 *  @retval GEMINI_ERR_BUSY  it is entered, or being captured; nothing changed. Since: 0.1 */
GEMINI_API gemini_status_t gemini_graph_destroy(gemini_graph_t graph);
/** @} */

/** @defgroup alloc Non-model memory
 *  @{ */
/** Allocates device memory, 512-byte aligned, evicting chunks when the budget is full.
 *  @param ptr_out    transferred to the caller; end with gemini_free(); usable by work queued on stream
 *  @retval GEMINI_ERR_OOM_DEVICE  nothing evictable is left; the message says what holds the memory. Since: 0.1 */
GEMINI_API gemini_status_t gemini_alloc(gemini_manager_t mgr, uint64_t size_bytes, gemini_stream_t stream,
                                        void **ptr_out) GEMINI_MUST_CHECK;
/** Frees memory after the work queued on stream so far, which must include its last use. NULL is accepted.
 *  @retval GEMINI_ERR_INVALID  ptr is not the start of a live allocation. Since: 0.1 */
GEMINI_API gemini_status_t gemini_free(gemini_manager_t mgr, void *ptr, gemini_stream_t stream);
/** Allocates page-locked host memory out of the host budget, in which chunks make room for it: for staging, for
 *  activations kept on the host, for small tensors. Bytes are undefined.
 *  @param alignment a power of two up to 2 MiB; 0 = 16
 *  @param ptr_out   transferred to the caller; end with gemini_host_free(), or with the manager
 *  @retval GEMINI_ERR_OOM_HOST  the budget has no room, or chunks acquired on the host lie in the way
 *  @retval GEMINI_ERR_INVALID   size_bytes is 0, alignment is no power of two
 *  May block while chunks leave for files. Since: 0.1 */
GEMINI_API gemini_status_t gemini_host_alloc(gemini_manager_t mgr, uint64_t size_bytes, uint64_t alignment,
                                             void **ptr_out) GEMINI_MUST_CHECK;
/** Frees it at once: no queued work may use it any more. NULL is accepted.
 *  @retval GEMINI_ERR_INVALID  ptr is not the start of a live block. Since: 0.1 */
GEMINI_API gemini_status_t gemini_host_free(gemini_manager_t mgr, void *ptr);
/** @} */

/** @defgroup data Zero, load, store, norm, update
 *  @{ */
/** Makes a range read as zero; whole chunks cost nothing until they are used.
 *  @param access object and range; mode and tier are ignored
 *  @retval GEMINI_ERR_BUSY      a part of it is acquired
 *  @retval GEMINI_ERR_STATE     a part of a parameter whose bytes its gradient has taken
 *  @retval GEMINI_ERR_OOM_HOST  a chunk of which only a part is zeroed has no room on the host; nothing changed
 *  @retval GEMINI_ERR_DEVICE    the device refused; parts of the range on it may be zero. Since: 0.1 */
GEMINI_API gemini_status_t gemini_zero(gemini_manager_t mgr, const gemini_access_t *access) GEMINI_MUST_CHECK;
/** Reads a range from a file descriptor into the tier below the device. Tensors it reads into, be it in part, leave the
 *  state FREE for HOLD. Blocks.
 *  @param fd_offset byte offset in the file
 *  @retval GEMINI_ERR_IO, GEMINI_ERR_FORMAT  reading failed, or the file ends early: the bytes of the range that
 *          were read are changed, the rest are not; native_code is errno or 0. So do GEMINI_ERR_DEVICE and
 *          GEMINI_ERR_OOM_SYSTEM, once reading has begun
 *  @retval GEMINI_ERR_OOM_HOST  the range does not fit on the host; nothing changed. With a file tier, or with other
 *          threads that take room meanwhile, as GEMINI_ERR_IO, and so is GEMINI_ERR_OOM_FILE
 *  @retval GEMINI_ERR_BUSY  a part of it is acquired, or pinned to the device
 *  @retval GEMINI_ERR_STATE  a part of a parameter whose bytes its gradient has taken, or the other way round. Since:
 *          0.1 */
GEMINI_API gemini_status_t gemini_load(gemini_manager_t mgr, const gemini_access_t *access, int fd, uint64_t fd_offset)
    GEMINI_MUST_CHECK;
/** Writes a range to a file descriptor at fd_offset, from wherever its newest bytes are. Blocks.
 *  @retval GEMINI_ERR_STATE  a parameter whose bytes its gradient has taken, or the other way round; an arena's range
 *          is written as it is
 *  @retval GEMINI_ERR_IO, GEMINI_ERR_OOM_FILE  writing failed, or the disk, a quota or the limit on the size of files
 *          is exhausted: a part of the range may have been written; native_code is errno
 *  @retval GEMINI_ERR_BUSY  a part of it is acquired for writing; nothing was written, unless it was acquired by
 *          another thread while this one wrote. Since: 0.1 */
GEMINI_API gemini_status_t gemini_store(gemini_manager_t mgr, const gemini_access_t *access, int fd, uint64_t fd_offset)
    GEMINI_MUST_CHECK;

enum { GEMINI_DTYPE_F32 = 0, GEMINI_DTYPE_BF16 = 1, GEMINI_DTYPE_F16 = 2, GEMINI_DTYPE_F64 = 3 };
/** The Euclidean norm of a range, summed in double where each chunk is, on the host by the workers of updates. The
 *  order of additions depends on the range and on what it holds only: left to right within each 64 KiB of the arena,
 *  then these sums. So the result has the same bits wherever chunks are. Pending updates of the range come first. In a
 *  reusing arena, a parameter whose gradient was not written counts as zero. Blocks.
 *  @param access object and range, a multiple of the dtype's size; mode and tier are ignored
 *  @param stream the work that produced the range
 *  @retval GEMINI_ERR_STATE  a parameter whose bytes its gradient has taken
 *  @retval other             a chunk could not be brought to the host: norm_out is untouched. Since: 0.1 */
GEMINI_API gemini_status_t gemini_norm(gemini_manager_t mgr, const gemini_access_t *access, uint32_t dtype,
                                       gemini_stream_t stream, double *norm_out) GEMINI_MUST_CHECK;

typedef struct gemini_update_span {
  uint32_t struct_size;   /* bytes the library filled */
  uint32_t tier;          /* GEMINI_TIER_HOST: compute now. GEMINI_TIER_DEVICE: only queue work on stream */
  uint64_t first_element; /* of the arenas */
  uint64_t element_count;
  gemini_stream_t stream; /* GEMINI_TIER_DEVICE only */
  uint32_t arena_count;
  uint32_t reserved;
  void *ptr[8]; /* in the order of gemini_update_t.arenas: the element first_element of each */
} gemini_update_span_t;
/** @param span borrowed until return. HOST: called on the library's workers, several spans at once, and must not
 *  call the library. DEVICE: called on the thread of gemini_update() or, for a span that had to wait, on a thread that
 *  uses one of its chunks or waits for updates, or on one of the library's; one span of a manager at a time. It may
 *  call gemini_stream_call() and gemini_stream_native() only, and must not wait for another thread: until it has
 *  returned, calls of other threads that look at chunks wait. In both, gemini_last_error() and gemini_error_set() may
 *  be called. */
typedef void (*gemini_update_fn)(void *user, const gemini_update_span_t *span);

enum {
  GEMINI_UPDATE_LATE = 1 /* return at once; each chunk's update is done before the chunk's next use */
};
typedef struct gemini_update_s {
  uint32_t struct_size;         /* bytes; set by GEMINI_UPDATE_INIT */
  uint32_t flags;               /* GEMINI_UPDATE_* */
  const gemini_arena_t *arenas; /* arena_count arenas of one layout: one arena and arenas like it; borrowed */
  const uint32_t *modes;        /* arena_count of GEMINI_READ, GEMINI_WRITE, GEMINI_READ_WRITE; borrowed */
  uint32_t arena_count;         /* 1..8 */
  uint32_t reserved;            /* 0 */
  uint64_t first_element;
  uint64_t element_count; /* not 0; but 0 with first_element 0: all elements used so far */
  gemini_stream_t stream; /* the update comes after this stream's work queued so far */
  gemini_update_fn fn;
  void *user; /* borrowed until every span has run: gemini_update_wait() or a later use */
} gemini_update_t;
#define GEMINI_UPDATE_INIT { sizeof(gemini_update_t), 0, NULL, NULL, 0, 0, 0, 0, 0, NULL, NULL }

/** Walks arenas of one layout, span by span, and runs fn on each span where its chunks live. A span is a part of the
 *  range in one chunk of the arena with the smallest elements, and on the host in one chunk of every arena; spans do
 *  not overlap and cover the range. A tensor in a reusing arena whose gradient was not written since its parameter was
 *  is given a zero gradient. An arena written without READ must be written whole. Afterwards the tensors written to are
 *  in state HOLD and hold parameters again.
 *  @retval GEMINI_ERR_BUSY      a part of the range is acquired; nothing changed
 *  @retval GEMINI_ERR_INVALID   a value is out of range, or a bound of the range cuts a tensor whose bytes hold a
 *                               gradient while its parameter is to be written; nothing changed
 *  @retval GEMINI_ERR_STATE     a parameter is to be read whose bytes its gradient has taken, or would take as zero; or
 *                               a gradient in a reusing arena was not written, and the update does not write its
 *                               parameter; nothing changed
 *  @retval GEMINI_ERR_OOM_HOST  without a file tier, the host has no room for the chunks; nothing changed
 *  @retval GEMINI_ERR_PENDING   (never with GEMINI_UPDATE_LATE) the update was accepted and is not done, or cannot be:
 *                               the message says where it stands and why. gemini_update_wait() goes on with it, and
 *                               returns what it fails with; to call gemini_update() again would update twice
 *  @retval GEMINI_ERR_DEVICE    the device could not say what stream has queued so far; nothing changed. This,
 *                               GEMINI_ERR_IO and GEMINI_ERR_FORMAT also: an earlier update failed for good, as
 *                               gemini_update_wait() says, and no other is accepted
 *  Every other error, too, means that the update was not accepted, and nothing changed.
 *  An update that is accepted is done as a whole: spans that cannot run yet, as there is no room for their chunks or a
 *  chunk could not be moved, stay pending, and user with them, and run when they can, before anybody uses one of their
 *  chunks. Until then such a use fails with what keeps them from running. Since: 0.1 */
GEMINI_API gemini_status_t gemini_update(gemini_manager_t mgr, const gemini_update_t *update) GEMINI_MUST_CHECK;
/** Blocks until every update submitted so far is done. Where one cannot go on, what is left of it stays pending; the
 *  message says how much that is, and gemini_stats_t.pending_updates counts it.
 *  @retval GEMINI_ERR_DEVICE  the device work before an update failed, so that the update did not run. This stays, and
 *          gemini_manager_close() returns it, too: the bytes of the model are not what they should be
 *  @retval GEMINI_ERR_IO, GEMINI_ERR_FORMAT  chunks of an update could not be read from their file, or were damaged
 *          there; GEMINI_ERR_OOM_HOST, GEMINI_ERR_OOM_FILE: there is no room for them. What can be tried again stays
 *          pending and is; what cannot stays so and is returned by gemini_manager_close(), too. Since: 0.1 */
GEMINI_API gemini_status_t gemini_update_wait(gemini_manager_t mgr) GEMINI_MUST_CHECK;
/** @} */

/** @defgroup keep Checkpoints in kept files
 *  @{ */
/** Makes what all arenas hold now, and the states of their tensors (HOLD of those that are acquired), what a later
 *  process finds in the kept files, once every pending update is done. Chunks that have not changed since they went to
 *  a file are not written again. After a kill at any time the previous checkpoint or this one is there, whole. Files
 *  need room for both, until this returns.
 *  @retval GEMINI_ERR_STATE     the manager was opened without checkpoint_name
 *  @retval GEMINI_ERR_BUSY      a range is acquired for writing
 *  @retval GEMINI_ERR_OOM_FILE, GEMINI_ERR_IO  the previous checkpoint stays
 *  Blocks. Since: 0.1 */
GEMINI_API gemini_status_t gemini_checkpoint(gemini_manager_t mgr) GEMINI_MUST_CHECK;
/** Takes up the last checkpoint in the kept files: no byte is read before it is used. Arenas and tensors must have been
 *  made as they were, by name, kind and size, and hold no bytes yet; chunk_bytes and file_dir must be the same.
 *  @retval GEMINI_ERR_NOT_FOUND  there is no checkpoint
 *  @retval GEMINI_ERR_FORMAT     it is of other arenas or tensors: the message names one; nothing changed
 *  @retval GEMINI_ERR_STATE      no checkpoint_name, an arena holds bytes, or a checkpoint was made or taken up before
 *  @retval GEMINI_ERR_OOM_FILE   its chunks are more than the file budget; nothing changed
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_resume(gemini_manager_t mgr) GEMINI_MUST_CHECK;
/** @} */

/** @defgroup hook Allocators for frameworks
 *  Non-model memory in the shapes that PyTorch's pluggable allocator and CuPy's allocator of C functions call
 *  (docs/hook.md). What is allocated counts, evicts and is freed as by gemini_alloc() and gemini_free(), and
 *  gemini_free() takes it, too.
 *
 *  Streams are the framework's own, named as its API names them (cudaStream_t; NULL is the default stream); each is
 *  adopted at its first call, as by gemini_stream_adopt(), and is one of the manager's 48; where all are taken, the
 *  one unused for longest among those that hooks adopted makes room, for which an allocation waits. It must exist until
 *  gemini_hook_forget() or the manager's end; one that was destroyed before, and whose handle names another stream now,
 *  is noticed from CUDA 12 on, and the next allocation there waits for the GPU. On the simulated device, which has no
 *  such streams, the argument is a gemini_stream_t, and NULL GEMINI_STREAM_CALLER.
 *
 *  Any thread may call them, with any stream and with locks of the framework's held: they never call back, not even the
 *  log, and frees never wait, for the GPU or for other calls. What fails is in gemini_last_error(); a manager's first
 *  failure is logged, too, when the next call of another function returns.
 *  @{ */
/** The manager serves the allocations of its device (config.device_ordinal; 0 for the simulated one) from now on.
 *  An allocation that finds no room evicts, and is refused only when that makes none: callers that empty caches of
 *  their own when they are refused keep what they have until chunks have made room.
 *  @param flags 0
 *  @retval GEMINI_ERR_EXISTS   another manager serves that device
 *  @retval GEMINI_ERR_INVALID  flags is not 0, or the ordinal is above 63. Since: 0.1 */
GEMINI_API gemini_status_t gemini_hook_set(gemini_manager_t mgr, uint32_t flags) GEMINI_MUST_CHECK;
/** Allocations of its device are refused from now on, until a manager serves it; frees go on. Closing the manager does
 *  this, too; frees of its pointers that come after are ignored.
 *  @retval GEMINI_ERR_STATE  it serves none. Since: 0.1 */
GEMINI_API gemini_status_t gemini_hook_clear(gemini_manager_t mgr);
/** Waits for the work of a stream that these functions were called with, and forgets it: from then on it may be
 *  destroyed.
 *  @param stream as they were given it
 *  @retval GEMINI_ERR_NOT_FOUND  no call named it, or gemini_stream_adopt() did; always so on the simulated device.
 *          Blocks. Since: 0.1 */
GEMINI_API gemini_status_t gemini_hook_forget(gemini_manager_t mgr, void *stream);

/** For torch.cuda.memory.CUDAPluggableAllocator: gemini_alloc(), usable by work queued on stream.
 *  @param size bytes; 0 returns NULL, which is no failure
 *  @return NULL: refused as by gemini_alloc(); or a size below 0, a device that nobody serves, a stream that cannot be
 *          adopted. Since: 0.1 */
GEMINI_API void *gemini_torch_malloc(ptrdiff_t size, int device, void *stream);
/** Likewise gemini_free(), after the work queued on stream so far, which may be another one than the allocation's.
 *  @param ptr  NULL, pointers of managers closed since and, after fork(), those of the parent's are ignored; one that
 *              is no live allocation is a failure, and ignored, too; one that was freed twice under another thread's
 *              call is noticed later
 *  @param size ignored, and so is device where another manager serves it since
 *  A stream that cannot be adopted: a failure, and the memory stays allocated. Since: 0.1 */
GEMINI_API void gemini_torch_free(void *ptr, ptrdiff_t size, int device, void *stream);
/** For cupy.cuda.memory.CFunctionAllocator: as gemini_torch_malloc(). CuPy says no stream.
 *  @param param the stream that all work on this allocator's memory is queued on. Since: 0.1 */
GEMINI_API void *gemini_cupy_malloc(void *param, size_t size, int device);
/** As gemini_torch_free(). @param param as of gemini_cupy_malloc(). Since: 0.1 */
GEMINI_API void gemini_cupy_free(void *param, void *ptr, int device);
/** @} */

/** @defgroup topology Topology
 *  What a machine is made of, as far as it matters to where bytes live: NUMA nodes, GPUs and disks, and which is near
 *  which. Objects of a kind are numbered from 0. A topology is read once and does not change.
 *  @{ */
typedef uint64_t gemini_topology_t;

enum {
  GEMINI_OBJECT_NODE = 0, /* NUMA node: memory and the processors next to it */
  GEMINI_OBJECT_GPU = 1,
  GEMINI_OBJECT_DISK = 2, /* whole disk, or namespace of an NVMe drive */
  GEMINI_OBJECT_COUNT = 3
};
/** How near two objects are: smaller is nearer. */
enum {
  GEMINI_DISTANCE_SAME = 0,    /* the same object, or two of one device */
  GEMINI_DISTANCE_SWITCH = 1,  /* below one PCI switch: bytes need not pass the processor */
  GEMINI_DISTANCE_BRIDGE = 2,  /* below one PCI host bridge */
  GEMINI_DISTANCE_NODE = 3,    /* at one NUMA node */
  GEMINI_DISTANCE_PACKAGE = 4, /* at one processor package */
  GEMINI_DISTANCE_MACHINE = 5, /* at different packages */
  GEMINI_DISTANCE_UNKNOWN = 6  /* the system does not say where one of them is */
};
/** The index of no object. */
#define GEMINI_INDEX_NONE UINT32_MAX

typedef struct gemini_topology_object_s {
  uint32_t struct_size;  /* bytes; set by GEMINI_TOPOLOGY_OBJECT_INIT; on return, bytes filled */
  uint32_t kind;         /* GEMINI_OBJECT_* */
  uint32_t system_index; /* nodes: the system's number for it; others: GEMINI_INDEX_NONE */
  uint32_t node;         /* index of the nearest node, of a node itself; GEMINI_INDEX_NONE: the system does not say */
  uint32_t cpus;         /* nodes: logical processors next to it */
  uint32_t reserved;
  uint64_t size_bytes; /* memory of a node, capacity of a disk; 0: not known */
  char pci[16];        /* GPUs and disks: "0000:17:00.0"; "" where there is none */
  char name[128];      /* "node0"; model of a GPU, or "vendor:device" as PCI numbers; "nvme0n1" */
} gemini_topology_object_t;
#define GEMINI_TOPOLOGY_OBJECT_INIT { sizeof(gemini_topology_object_t), 0, 0, 0, 0, 0, 0, "", "" }

/** Reads the topology of this machine, or a saved one.
 *  @param xml_path     NULL: this machine. Otherwise a file that hwloc wrote (lstopo machine.xml); borrowed until
 *          return
 *  @param topology_out transferred to the caller; end with gemini_topology_close()
 *  @retval GEMINI_ERR_IO           the file cannot be read; native_code is errno
 *  @retval GEMINI_ERR_FORMAT       the file is no topology
 *  @retval GEMINI_ERR_UNSUPPORTED  the system does not describe this machine
 *  @retval GEMINI_ERR_INVALID      topology_out is NULL, or 64 topologies are open
 *  @retval GEMINI_ERR_OOM_SYSTEM   no memory for its records, or no process could be started to look at the file
 *  Blocks for some milliseconds. A file is first loaded by a forked child, as damaged ones can end the process that
 *  loads them: that may take up to 10 s. Does not start a GPU's driver. Since: 0.1 */
GEMINI_API gemini_status_t gemini_topology_open(const char *xml_path, gemini_topology_t *topology_out)
    GEMINI_MUST_CHECK;
/** Frees a topology. 0 is accepted.
 *  @retval GEMINI_ERR_HANDLE  no such topology
 *  Threads: no other call on this topology may run. Since: 0.1 */
GEMINI_API gemini_status_t gemini_topology_close(gemini_topology_t topology);
/** How many objects of a kind there are.
 *  @param kind GEMINI_OBJECT_*
 *  @retval GEMINI_ERR_INVALID  kind is out of range. Since: 0.1 */
GEMINI_API gemini_status_t gemini_topology_count(gemini_topology_t topology, uint32_t kind, uint32_t *count_out)
    GEMINI_MUST_CHECK;
/** What an object is.
 *  @param object_out caller-allocated; struct_size set; borrowed until return
 *  @retval GEMINI_ERR_INVALID  there is no such kind or index. Since: 0.1 */
GEMINI_API gemini_status_t gemini_topology_object(gemini_topology_t topology, uint32_t kind, uint32_t index,
                                                  gemini_topology_object_t *object_out) GEMINI_MUST_CHECK;
/** How near two objects are; the same both ways.
 *  @param distance_out GEMINI_DISTANCE_*
 *  @retval GEMINI_ERR_INVALID  there is no such kind or index. Since: 0.1 */
GEMINI_API gemini_status_t gemini_topology_distance(gemini_topology_t topology, uint32_t kind, uint32_t index,
                                                    uint32_t other_kind, uint32_t other_index, uint32_t *distance_out)
    GEMINI_MUST_CHECK;
/** The object of wanted_kind that is nearest to an object, other than itself; the lowest index of several. The node
 *  nearest to a node is that node, and of the nodes next to a GPU or disk the first that has memory.
 *  @retval GEMINI_ERR_NOT_FOUND  there is none, or the system does not say
 *  @retval GEMINI_ERR_INVALID    there is no such kind or index. Since: 0.1 */
GEMINI_API gemini_status_t gemini_topology_nearest(gemini_topology_t topology, uint32_t kind, uint32_t index,
                                                   uint32_t wanted_kind, uint32_t *index_out) GEMINI_MUST_CHECK;
/** The disks that hold a directory of this machine: several where volumes span them (RAID, LVM, device mapper).
 *  @param path      directory or file; borrowed until return
 *  @param disks_out capacity indices of disks, in ascending order
 *  @param count_out how many of them were filled
 *  @param node_out  the node near all of them, GEMINI_INDEX_NONE when they differ; may be NULL
 *  @retval GEMINI_ERR_NOT_FOUND    it is on no disk of the topology (network, memory, overlay)
 *  @retval GEMINI_ERR_INVALID      capacity is too small (64 always is enough); the message says how many there are
 *  @retval GEMINI_ERR_IO           path cannot be looked up; native_code is errno
 *  @retval GEMINI_ERR_UNSUPPORTED  the topology is a saved one. Since: 0.1 */
GEMINI_API gemini_status_t gemini_topology_directory(gemini_topology_t topology, const char *path, uint32_t *disks_out,
                                                     uint32_t capacity, uint32_t *count_out, uint32_t *node_out)
    GEMINI_MUST_CHECK;
/** @} */

/** @defgroup insight Statistics, plan, trace, timeline
 *  @{ */
enum {
  GEMINI_LINK_H2D = 0, /* host to device */
  GEMINI_LINK_D2H = 1,
  GEMINI_LINK_H2F = 2, /* host to file */
  GEMINI_LINK_F2H = 3,
  GEMINI_LINK_COUNT = 4
};
enum {
  GEMINI_REASON_DEMAND = 0,   /* an acquire found the chunk elsewhere */
  GEMINI_REASON_PLAN = 1,     /* the plan fetched or evicted it ahead of time, or a graph fetched it in a replay */
  GEMINI_REASON_PRESSURE = 2, /* evicted to make room for an acquire or an allocation outside the plan */
  GEMINI_REASON_CALLER = 3,   /* hint, move, pin, budget change */
  GEMINI_REASON_UPDATE = 4,   /* an update, a norm, a load or a store needed it on the host */
  GEMINI_REASON_COUNT = 5
};
typedef struct gemini_stats_s {
  uint32_t struct_size; /* bytes; set by GEMINI_STATS_INIT; on return, bytes filled */
  uint32_t reserved;
  uint64_t budget_bytes[GEMINI_TIER_COUNT];
  uint64_t used_bytes[GEMINI_TIER_COUNT]; /* device: frames of chunks and of non-model memory */
  uint64_t peak_bytes[GEMINI_TIER_COUNT];
  uint64_t model_bytes;    /* of all arenas, reused bytes once */
  uint64_t nonmodel_bytes; /* live allocations now */
  uint64_t nonmodel_peak_bytes;
  uint64_t chunk_bytes;
  uint64_t moved_bytes[GEMINI_LINK_COUNT][GEMINI_REASON_COUNT];
  uint64_t moved_chunks[GEMINI_LINK_COUNT][GEMINI_REASON_COUNT];
  uint64_t acquire_hits;        /* chunks found resident by an acquire on the device */
  uint64_t acquire_misses;      /* chunks fetched by the acquire itself */
  uint64_t stall_ns;            /* streams stood still inside ops, waiting for chunks, in all */
  uint64_t iterations;          /* ended */
  uint64_t planned_iterations;  /* of these, run to their end under a plan */
  uint64_t departures;          /* iterations that left their plan */
  uint64_t plans;               /* made so far */
  uint64_t predicted_step_ns;   /* of the plan in force; 0 = none */
  uint64_t measured_step_ns;    /* last iteration, begin to begin or end */
  uint64_t planned_fetch_bytes; /* a step's fetches under the plan in force */
  uint64_t planned_evict_bytes; /* a step's write-backs under the plan in force */
  uint64_t op_peak_error_bytes; /* largest difference of predicted and actual non-model peak of an op, over all ops
                                    that began under a plan since the last gemini_stats_reset() */
  uint64_t pending_updates;     /* parts of updates submitted and not done; those on the device count as one */
  uint32_t file_engine;         /* GEMINI_FILE_ENGINE_URING, _THREADS; _AUTO: there is no file tier */
  uint32_t reserved2;
  uint64_t host_alloc_bytes; /* live, of gemini_host_alloc() */
} gemini_stats_t;
#define GEMINI_STATS_INIT   \
  { sizeof(gemini_stats_t), \
    0,                      \
    { 0, 0, 0 },            \
    { 0, 0, 0 },            \
    { 0, 0, 0 },            \
    0,                      \
    0,                      \
    0,                      \
    0,                      \
    { { 0 } },              \
    { { 0 } },              \
    0,                      \
    0,                      \
    0,                      \
    0,                      \
    0,                      \
    0,                      \
    0,                      \
    0,                      \
    0,                      \
    0,                      \
    0,                      \
    0,                      \
    0,                      \
    0,                      \
    0,                      \
    0 }
/** Copies the statistics. Never waits, whatever other threads' calls wait for; while one is under way, the figures may
 *  not all be of one moment; a peak is never below what is in use.
 *  @param stats_out caller-allocated; struct_size set; borrowed until return. Since: 0.1 */
GEMINI_API gemini_status_t gemini_stats(gemini_manager_t mgr, gemini_stats_t *stats_out) GEMINI_MUST_CHECK;
/** Starts peaks, moved bytes, hits, stalls and errors anew; what is in use stays counted. Since: 0.1 */
GEMINI_API gemini_status_t gemini_stats_reset(gemini_manager_t mgr) GEMINI_MUST_CHECK;

/** The manager's state in words, for people: what is used in each tier, which chunks are where, which operator is open,
 *  what is acquired and how often, and which threads wait inside the library, for what and since when. Never waits for
 *  another call: what one is changing at this moment is left out, and the text says so. Always NUL-terminated.
 *  @param text_out   size_bytes bytes; NULL with size_bytes 0 to ask for the length
 *  @param length_out bytes that the text had without the NUL, which is different the next time; may be NULL. Since:
 *          0.1 */
GEMINI_API gemini_status_t gemini_manager_dump(gemini_manager_t mgr, char *text_out, uint64_t size_bytes,
                                               uint64_t *length_out) GEMINI_MUST_CHECK;

/** The plan in force in words: what stays, what comes and goes, what binds the step. Always NUL-terminated.
 *  @param text_out   size_bytes bytes; NULL with size_bytes 0 to ask for the length
 *  @param length_out bytes needed without the NUL; may be NULL. Since: 0.1 */
GEMINI_API gemini_status_t gemini_plan_explain(gemini_manager_t mgr, char *text_out, uint64_t size_bytes,
                                               uint64_t *length_out) GEMINI_MUST_CHECK;
/** Writes the last complete iteration's trace to a text file (docs/trace.md).
 *  @retval GEMINI_ERR_STATE  none yet
 *  @retval GEMINI_ERR_IO, GEMINI_ERR_OOM_FILE  writing failed, or the disk, a quota or the limit on the size of files
 *          is exhausted; native_code is errno. Since: 0.1 */
GEMINI_API gemini_status_t gemini_trace_save(gemini_manager_t mgr, const char *path) GEMINI_MUST_CHECK;
/** Takes a saved trace instead of a warm-up and plans from it. Arenas must be those of the trace by name and size.
 *  @retval GEMINI_ERR_OOM_DEVICE  an op's working set does not fit: the message names the op and the bytes it lacks
 *  @retval GEMINI_ERR_STATE       an iteration is open
 *  @retval GEMINI_ERR_FORMAT      the file is no trace, or of other arenas. Since: 0.1 */
GEMINI_API gemini_status_t gemini_trace_load(gemini_manager_t mgr, const char *path) GEMINI_MUST_CHECK;
/** Starts recording a timeline; gemini_timeline_stop() or close writes it to path as Chrome trace JSON, which
 *  ui.perfetto.dev opens. Since: 0.1 */
GEMINI_API gemini_status_t gemini_timeline_start(gemini_manager_t mgr, const char *path) GEMINI_MUST_CHECK;
/** Blocks until recorded work is done.
 *  @retval GEMINI_ERR_STATE  none is being recorded
 *  @retval GEMINI_ERR_IO, GEMINI_ERR_OOM_FILE  as of gemini_trace_save(); the recording has ended. Since: 0.1 */
GEMINI_API gemini_status_t gemini_timeline_stop(gemini_manager_t mgr) GEMINI_MUST_CHECK;
/** @} */

#ifdef __cplusplus
}
#endif
#endif

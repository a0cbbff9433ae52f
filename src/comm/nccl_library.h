/* The part of NCCL's interface that the library uses: types, values and functions. Declared here so that a machine
 * without NCCL builds the same library. SPDX-License-Identifier: Apache-2.0
 *
 * Written for NCCL 2.18 (the oldest version with which non-blocking communicators are used) to 2.30. Values and layouts
 * are NCCL's binary interface. Names are NCCL's without its prefix. */
#ifndef GMI_NCCL_LIBRARY_H
#define GMI_NCCL_LIBRARY_H

#include <stddef.h>
#include <stdint.h>

#include "device/cuda_driver.h"

enum { GMI_NCCL_OLDEST = 21800 /* 2.18.0, as ncclGetVersion() has it */ };

typedef int nccl_result_t; /* ncclResult_t */
enum {                     /* the values that are distinguished */
       NCCL_SUCCESS = 0,
       NCCL_INVALID_ARGUMENT = 4,
       NCCL_REMOTE_ERROR = 6,
       NCCL_IN_PROGRESS = 7 /* of a non-blocking communicator: ask ncclCommGetAsyncError() */
};
enum { /* ncclDataType_t */
       NCCL_INT8 = 0,
       NCCL_FLOAT16 = 6,
       NCCL_FLOAT32 = 7,
       NCCL_FLOAT64 = 8,
       NCCL_BFLOAT16 = 9
};
enum { NCCL_SUM = 0 }; /* ncclRedOp_t */

typedef struct nccl_comm *nccl_comm_t; /* ncclComm_t */
typedef struct nccl_id {               /* ncclUniqueId */
  char bytes[128];
} nccl_id_t;

/* ncclConfig_t of 2.18. Later versions read what is missing as undefined by `version`; the first field that they added
 * lies in what was padding, so it is named here and undefined as well. */
typedef struct nccl_config {
  size_t size;
  unsigned magic, version;
  int blocking;
  int cga_cluster_size, min_ctas, max_ctas;
  const char *net_name;
  int split_share;
  int traffic_class; /* since 2.25 */
} nccl_config_t;
#define NCCL_UNDEFINED INT32_MIN
#define NCCL_CONFIG_NON_BLOCKING                                                                                 \
  { sizeof(nccl_config_t), 0xcafebeefu,   GMI_NCCL_OLDEST, 0, NCCL_UNDEFINED, NCCL_UNDEFINED, NCCL_UNDEFINED, 0, \
    NCCL_UNDEFINED,        NCCL_UNDEFINED }

/* X(field, symbol, parameters): field is called as library->field(...). */
#define GMI_NCCL_FUNCTIONS(X)                                                                                      \
  X(version, "ncclGetVersion", (int *version_out))                                                                 \
  X(unique_id, "ncclGetUniqueId", (nccl_id_t * id_out))                                                            \
  X(init_rank_config, "ncclCommInitRankConfig",                                                                    \
    (nccl_comm_t * comm_out, int ranks, nccl_id_t id, int rank, nccl_config_t *config))                            \
  X(finalize, "ncclCommFinalize", (nccl_comm_t comm))                                                              \
  X(destroy, "ncclCommDestroy", (nccl_comm_t comm))                                                                \
  X(abort, "ncclCommAbort", (nccl_comm_t comm))                                                                    \
  X(async_error, "ncclCommGetAsyncError", (nccl_comm_t comm, nccl_result_t * result_out))                          \
  X(count, "ncclCommCount", (nccl_comm_t comm, int *ranks_out))                                                    \
  X(user_rank, "ncclCommUserRank", (nccl_comm_t comm, int *rank_out))                                              \
  X(cu_device, "ncclCommCuDevice", (nccl_comm_t comm, int *device_out))                                            \
  X(all_gather, "ncclAllGather",                                                                                   \
    (const void *from, void *to, size_t count, int dtype, nccl_comm_t comm, cu_stream_t stream))                   \
  X(broadcast, "ncclBroadcast",                                                                                    \
    (const void *from, void *to, size_t count, int dtype, int root, nccl_comm_t comm, cu_stream_t stream))         \
  X(reduce_scatter, "ncclReduceScatter",                                                                           \
    (const void *from, void *to, size_t count, int dtype, int op, nccl_comm_t comm, cu_stream_t stream))           \
  X(all_reduce, "ncclAllReduce",                                                                                   \
    (const void *from, void *to, size_t count, int dtype, int op, nccl_comm_t comm, cu_stream_t stream))           \
  X(send, "ncclSend", (const void *from, size_t count, int dtype, int peer, nccl_comm_t comm, cu_stream_t stream)) \
  X(recv, "ncclRecv", (void *to, size_t count, int dtype, int peer, nccl_comm_t comm, cu_stream_t stream))         \
  X(group_start, "ncclGroupStart", (void))                                                                         \
  X(group_end, "ncclGroupEnd", (void))

typedef struct gmi_nccl_library {
#define FIELD(field, symbol, parameters) nccl_result_t(*field) parameters;
  GMI_NCCL_FUNCTIONS(FIELD)
#undef FIELD
  const char *(*error_string)(nccl_result_t result);
  const char *(*last_error)(nccl_comm_t comm); /* of the process; NULL: this NCCL has none */
  /* Since 2.19; both NULL: this NCCL has none. The handle is of the communicator. */
  nccl_result_t (*register_memory)(nccl_comm_t comm, void *memory, size_t size_bytes, void **handle_out);
  nccl_result_t (*unregister_memory)(nccl_comm_t comm, void *handle);
} gmi_nccl_library_t;

/* The process's NCCL: libnccl.so.2, as the dynamic linker finds it, so one that is loaded already, such as that of a
 * framework, is the one used. Opened at the first call and kept. NULL: there is none that can be used; the thread's
 * last error, UNSUPPORTED, says what is missing. Threads: any. */
const gmi_nccl_library_t *gmi_nccl_library(void);

/* For tests: functions are looked up by symbol() instead of in libnccl.so.2; NULL returns to libnccl.so.2. No
 * communicator may be open. */
void gmi_nccl_library_replace(void *(*symbol)(const char *name));

#endif

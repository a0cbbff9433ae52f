/* The part of the CUDA driver's interface that the CUDA device uses: types, values and functions. Declared here so that
 * a machine without the toolkit builds the same library. SPDX-License-Identifier: Apache-2.0
 *
 * Values and layouts are the driver's binary interface, the same in every version since CUDA 11.7 (the youngest
 * function used, cuStreamWaitValue64_v2, came with it). Names are the driver's without its prefix; functions carry the
 * versioned name that cuda.h would choose, so that each has the meaning it has there. */
#ifndef GMI_CUDA_DRIVER_H
#define GMI_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int cu_result_t;       /* CUresult */
typedef int cu_device_t;       /* CUdevice: an ordinal */
typedef uint64_t cu_address_t; /* CUdeviceptr, 64-bit machines only */
typedef uint64_t cu_memory_t;  /* CUmemGenericAllocationHandle: physical memory; 0 is a valid one */
typedef struct cu_context *cu_context_t;
typedef struct cu_stream *cu_stream_t; /* NULL: the legacy default stream of the current context */
typedef struct cu_event *cu_event_t;
typedef struct cu_module *cu_module_t;
typedef struct cu_function *cu_function_t;
typedef void (*cu_host_fn_t)(void *user);
enum { CU_CAPTURE_NONE = 0, CU_CAPTURE_ACTIVE = 1 }; /* CUstreamCaptureStatus */
enum { CU_CAPTURE_MODE_GLOBAL = 0, CU_CAPTURE_MODE_RELAXED = 2 };

enum { /* CUresult: the values that are distinguished */
       CU_SUCCESS = 0,
       CU_INVALID_VALUE = 1,
       CU_OUT_OF_MEMORY = 2,
       CU_NOT_INITIALIZED = 3,
       CU_DEINITIALIZED = 4, /* the process is ending */
       CU_NO_DEVICE = 100,
       CU_INVALID_DEVICE = 101,
       CU_INVALID_CONTEXT = 201,
       CU_ECC_UNCORRECTABLE = 214,
       CU_NVLINK_UNCORRECTABLE = 220,
       CU_CONTAINED = 226,
       CU_INVALID_HANDLE = 400,
       CU_NOT_FOUND = 500,
       CU_NOT_READY = 600,
       /* From here to LAUNCH_FAILED, and TENSOR_MEMORY_LEAK: mostly errors of a kernel. Those for which cuda.c's
        * loses_context() is true make every later call in the context fail with the same value, until the process
        * ends. */
       CU_ILLEGAL_ADDRESS = 700,
       CU_LAUNCH_TIMEOUT = 702,
       CU_CONTEXT_IS_DESTROYED = 709,
       CU_ASSERT = 710,
       CU_HOST_MEMORY_ALREADY_REGISTERED = 712,
       CU_HOST_MEMORY_NOT_REGISTERED = 713,
       CU_HARDWARE_STACK_ERROR = 714,
       CU_LAUNCH_FAILED = 719,
       CU_TENSOR_MEMORY_LEAK = 721,
       CU_NOT_SUPPORTED = 801,
       CU_MPS_CLIENT_TERMINATED = 810,
       CU_STREAM_CAPTURE_IMPLICIT = 906, /* the call would involve the default stream while another one is captured */
       CU_EXTERNAL_DEVICE = 911,
       CU_UNKNOWN = 999
};

enum {                                            /* CUdevice_attribute */
       CU_ATTRIBUTE_MEMORY_CLOCK_RATE = 36,       /* kHz */
       CU_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH = 37, /* bits */
       CU_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
       CU_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
       CU_ATTRIBUTE_HOST_REGISTER_SUPPORTED = 99,
       CU_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
       CU_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
       CU_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = 122
};

enum { CU_STREAM_HIGHEST_PRIORITY = -1000 };       /* the driver takes the nearest that the GPU has */
enum { CU_STREAM_NON_BLOCKING_FLAG = 1 };          /* CUstream_flags: no ordering with the legacy default stream */
#define CU_STREAM_PER_THREAD_HANDLE ((uintptr_t)2) /* CU_STREAM_PER_THREAD: another stream in each thread */
enum { CU_EVENT_NO_TIME = 2 };                     /* CUevent_flags: CU_EVENT_DISABLE_TIMING */
enum { CU_WAIT_VALUE_GEQ = 0 };                    /* CUstreamWaitValue_flags: until (int64_t)(*addr - value) >= 0 */
enum { CU_GRANULARITY_MINIMUM = 0 };               /* CUmemAllocationGranularity_flags */
enum { CU_ALLOCATION_PINNED = 1 };                 /* CUmemAllocationType */
enum { CU_HANDLE_POSIX_FILE_DESCRIPTOR = 1 };      /* CUmemAllocationHandleType */
enum { CU_LOCATION_DEVICE = 1 };                   /* CUmemLocationType */
enum { CU_ACCESS_READ_WRITE = 3 };                 /* CUmemAccess_flags */
enum { CU_HOST_PORTABLE = 1, CU_HOST_MAPPED = 2 }; /* CU_MEMHOSTALLOC_*, CU_MEMHOSTREGISTER_*: the same values */

typedef struct cu_location { /* CUmemLocation */
  int type;                  /* CU_LOCATION_DEVICE */
  int id;                    /* the ordinal */
} cu_location_t;
typedef struct cu_allocation { /* CUmemAllocationProp */
  int type;                    /* CU_ALLOCATION_PINNED */
  int handle_types;            /* how processes may share it; 0: not at all */
  cu_location_t location;
  void *windows_only;
  unsigned char compression, rdma_capable;
  unsigned short usage;
  unsigned char reserved[4];
} cu_allocation_t;
typedef struct cu_access { /* CUmemAccessDesc */
  cu_location_t location;
  int flags; /* CU_ACCESS_READ_WRITE */
} cu_access_t;

/* X(field, symbol, parameters): field is called as driver->field(...). */
#define GMI_CUDA_FUNCTIONS(X)                                                                                          \
  X(init, "cuInit", (unsigned flags))                                                                                  \
  X(version, "cuDriverGetVersion", (int *version_out))                                                                 \
  X(error_name, "cuGetErrorName", (cu_result_t result, const char **name_out))                                         \
  X(device_count, "cuDeviceGetCount", (int *count_out))                                                                \
  X(device_get, "cuDeviceGet", (cu_device_t * device_out, int ordinal))                                                \
  X(device_pci, "cuDeviceGetPCIBusId", (char *address_out, int size, cu_device_t device))                              \
  X(device_attribute, "cuDeviceGetAttribute", (int *value_out, int attribute, cu_device_t device))                     \
  X(primary_retain, "cuDevicePrimaryCtxRetain", (cu_context_t * context_out, cu_device_t device))                      \
  X(primary_release, "cuDevicePrimaryCtxRelease_v2", (cu_device_t device))                                             \
  X(current_get, "cuCtxGetCurrent", (cu_context_t * context_out))                                                      \
  X(current_set, "cuCtxSetCurrent", (cu_context_t context))                                                            \
  X(granularity, "cuMemGetAllocationGranularity", (size_t * bytes_out, const cu_allocation_t *allocation, int option)) \
  X(address_reserve, "cuMemAddressReserve",                                                                            \
    (cu_address_t * address_out, size_t size_bytes, size_t align_bytes, cu_address_t wish, unsigned long long flags))  \
  X(address_free, "cuMemAddressFree", (cu_address_t address, size_t size_bytes))                                       \
  X(memory_create, "cuMemCreate",                                                                                      \
    (cu_memory_t * memory_out, size_t size_bytes, const cu_allocation_t *allocation, unsigned long long flags))        \
  X(memory_release, "cuMemRelease", (cu_memory_t memory))                                                              \
  X(memory_map, "cuMemMap",                                                                                            \
    (cu_address_t address, size_t size_bytes, size_t offset, cu_memory_t memory, unsigned long long flags))            \
  X(memory_access, "cuMemSetAccess",                                                                                   \
    (cu_address_t address, size_t size_bytes, const cu_access_t *access, size_t count))                                \
  X(memory_unmap, "cuMemUnmap", (cu_address_t address, size_t size_bytes))                                             \
  X(host_alloc, "cuMemHostAlloc", (void **host_out, size_t size_bytes, unsigned flags))                                \
  X(host_free, "cuMemFreeHost", (void *host))                                                                          \
  X(host_address, "cuMemHostGetDevicePointer_v2", (cu_address_t * address_out, void *host, unsigned flags))            \
  X(host_register, "cuMemHostRegister_v2", (void *host, size_t size_bytes, unsigned flags))                            \
  X(host_unregister, "cuMemHostUnregister", (void *host))                                                              \
  X(stream_create, "cuStreamCreate", (cu_stream_t * stream_out, unsigned flags))                                       \
  X(stream_create_priority, "cuStreamCreateWithPriority", (cu_stream_t * stream_out, unsigned flags, int priority))    \
  X(stream_destroy, "cuStreamDestroy_v2", (cu_stream_t stream))                                                        \
  X(stream_capturing, "cuStreamIsCapturing", (cu_stream_t stream, int *status_out))                                    \
  X(capture_mode, "cuThreadExchangeStreamCaptureMode", (int *mode))                                                    \
  X(stream_context, "cuStreamGetCtx", (cu_stream_t stream, cu_context_t * context_out))                                \
  X(stream_wait, "cuStreamWaitEvent", (cu_stream_t stream, cu_event_t event, unsigned flags))                          \
  X(stream_wait_value, "cuStreamWaitValue64_v2",                                                                       \
    (cu_stream_t stream, cu_address_t address, uint64_t value, unsigned flags))                                        \
  X(event_create, "cuEventCreate", (cu_event_t * event_out, unsigned flags))                                           \
  X(event_destroy, "cuEventDestroy_v2", (cu_event_t event))                                                            \
  X(event_record, "cuEventRecord", (cu_event_t event, cu_stream_t stream))                                             \
  X(event_query, "cuEventQuery", (cu_event_t event))                                                                   \
  X(event_elapsed, "cuEventElapsedTime", (float *ms_out, cu_event_t begin, cu_event_t end))                            \
  X(copy_h2d, "cuMemcpyHtoDAsync_v2", (cu_address_t dst, const void *src, size_t size_bytes, cu_stream_t stream))      \
  X(copy_d2h, "cuMemcpyDtoHAsync_v2", (void *dst, cu_address_t src, size_t size_bytes, cu_stream_t stream))            \
  X(copy_d2d, "cuMemcpyDtoDAsync_v2", (cu_address_t dst, cu_address_t src, size_t size_bytes, cu_stream_t stream))     \
  X(set_bytes, "cuMemsetD8Async", (cu_address_t dst, unsigned char byte, size_t count, cu_stream_t stream))            \
  X(host_call, "cuLaunchHostFunc", (cu_stream_t stream, cu_host_fn_t fn, void *user))                                  \
  X(launch, "cuLaunchKernel",                                                                                          \
    (cu_function_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,    \
     unsigned block_z, unsigned shared_bytes, cu_stream_t stream, void **parameters, void **extra))                    \
  X(module_load, "cuModuleLoadData", (cu_module_t * module_out, const void *image))                                    \
  X(module_function, "cuModuleGetFunction", (cu_function_t * function_out, cu_module_t module, const char *name))      \
  X(module_unload, "cuModuleUnload", (cu_module_t module))                                                             \
  X(context_wait, "cuCtxSynchronize", (void))
/* Functions that an older driver may lack: NULL then. */
#define GMI_CUDA_OPTIONAL(X)                                                                                 \
  X(stream_id, "cuStreamGetId", (cu_stream_t stream, unsigned long long *id_out))                            \
  X(capture_info, "cuStreamGetCaptureInfo_v2",                                                               \
    (cu_stream_t stream, int *status_out, uint64_t *id_out, void **graph_out, const void **dependencies_out, \
     size_t *count_out))

typedef struct gmi_cuda_driver {
#define FIELD(field, symbol, parameters) cu_result_t(*field) parameters;
  GMI_CUDA_FUNCTIONS(FIELD)
  GMI_CUDA_OPTIONAL(FIELD)
#undef FIELD
} gmi_cuda_driver_t;

/* The PTX of sum_squares.cu, which the build embeds. */
extern const char gmi_sum_squares_ptx[];

/* Arguments and result of one sum, in page-locked host memory that the kernel of sum_squares.cu reads and writes. The
 * kernel declares the same layout as struct item. */
typedef struct gmi_cuda_sum {
  uint64_t src;
  uint64_t count;
  double sum; /* the result */
  uint32_t dtype;
  uint32_t reserved;
} gmi_cuda_sum_t;

/* The driver of this machine, opened at the first call and kept. NULL: there is none that can be used; the thread's
 * last error says what is missing. Threads: any. */
const gmi_cuda_driver_t *gmi_cuda_driver(void);
/* "CUDA_ERROR_OUT_OF_MEMORY", or "CUDA error 1234" where the driver has no name for it. In static storage of the
 * driver, or in the calling thread's own, until its next call. */
const char *gmi_cuda_error_name(const gmi_cuda_driver_t *driver, cu_result_t result);

/* For tests: functions are looked up by symbol() instead of in libcuda.so.1; NULL returns to libcuda.so.1. No device
 * may be open. */
void gmi_cuda_driver_replace(void *(*symbol)(const char *name));

#endif

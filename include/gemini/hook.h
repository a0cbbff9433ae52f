/* libgemini: allocators in the shapes that frameworks call.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Its words and conventions are those of gemini.h. */
#ifndef GEMINI_HOOK_H
#define GEMINI_HOOK_H

#include <gemini.h>

#ifdef __cplusplus
extern "C" {
#endif

/** @defgroup hook Allocators for frameworks
 *  Functions in the shapes that PyTorch's pluggable allocator and CuPy's allocator of C functions call (docs/hook.md).
 *  They allocate non-model memory: it counts, evicts and is freed as by gemini_alloc() and gemini_free(), and
 *  gemini_free() takes it, too.
 *
 *  A stream is named as the framework's API names it (cudaStream_t; NULL is the default stream). It is adopted at its
 *  first call, as by gemini_stream_adopt(), and is one of the manager's 48 streams. When all are taken, the hooked
 *  stream that was unused for longest makes room, and the allocation waits for that. A stream must exist until
 *  gemini_hook_forget() or until the manager is closed. From CUDA 12 on, a stream that was destroyed before, and whose
 *  handle names another stream now, is noticed, and the next allocation on it waits for the GPU. The simulated device
 *  has no such streams: there the argument is a gemini_stream_t, and NULL is GEMINI_STREAM_CALLER.
 *
 *  Any thread may call these functions, with any stream, and while it holds locks of the framework. They never call
 *  back, not even the log, and frees never wait, neither for the GPU nor for other calls. gemini_last_error() has their
 *  failures. A manager's first failure is also logged, when the next call of another function returns.
 *  @{ */
/** Makes the manager serve the allocations of its device (config.device_ordinal; 0 for the simulated device). An
 *  allocation that finds no room evicts chunks, and is refused only if that makes no room. A caller that empties caches
 *  of its own when it is refused therefore keeps them until chunks have made room.
 *  @param flags  0
 *  @retval GEMINI_ERR_EXISTS  another manager serves the device
 *  @retval GEMINI_ERR_INVALID  flags is not 0, or the ordinal is above 63
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_hook_set(gemini_manager_t mgr, uint32_t flags) GEMINI_MUST_CHECK;
/** Ends that service: allocations of the device are refused until a manager serves it again, and frees continue.
 *  Closing the manager does the same; later frees of its pointers are ignored.
 *  @retval GEMINI_ERR_STATE  the manager serves no device
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_hook_clear(gemini_manager_t mgr);
/** Waits for the work of a stream that these functions were called with, and forgets the stream. The caller may destroy
 *  it then.
 *  @param stream  as it was given to them
 *  @retval GEMINI_ERR_NOT_FOUND  no call has named the stream, or gemini_stream_adopt() adopted it; always on the
 *           simulated device
 *  Blocks. Since: 0.1 */
GEMINI_API gemini_status_t gemini_hook_forget(gemini_manager_t mgr, void *stream);
/** Tells that the caller has exchanged its memory within the open iteration, for instance the segments of a caching
 *  allocator for fewer ones with less waste, and that what is live when the iteration ends is all that iterations of
 *  this kind need from then on. The plan for them is made with that in the place of the peaks that operators had. An
 *  operator that needs more nevertheless departs from the plan, as any other does.
 *  @retval GEMINI_ERR_STATE  no iteration is open, or an operator is
 *  @retval GEMINI_ERR_UNSUPPORTED  the manager has a group, whose ranks agreed on the peaks
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_hook_compacted(gemini_manager_t mgr);

/** Allocates as gemini_alloc() does, for torch.cuda.memory.CUDAPluggableAllocator. Work queued on stream may use the
 *  memory.
 *  @param size  bytes; 0 returns NULL, which is no failure
 *  @return  NULL if gemini_alloc() would refuse, size is below 0, no manager serves the device, or the stream cannot be
 *           adopted
 *  Since: 0.1 */
GEMINI_API void *gemini_torch_malloc(ptrdiff_t size, int device, void *stream);
/** Frees as gemini_free() does, after the work queued on stream so far. The stream may be another one than the
 *  allocation's.
 *  @param ptr  ignored if it is NULL, or of a manager that was closed, or, after fork(), of the parent. A pointer that
 *           is no live allocation is a failure, and is ignored, too; one that is freed twice during another thread's
 *           call is noticed later
 *  @param size  ignored; so is device if another manager serves it now
 *  If the stream cannot be adopted, the call fails and the memory stays allocated. Since: 0.1 */
GEMINI_API void gemini_torch_free(void *ptr, ptrdiff_t size, int device, void *stream);
/** Allocates as gemini_torch_malloc() does, for cupy.cuda.memory.CFunctionAllocator. CuPy names no stream.
 *  @param param  the stream on which all work on this allocator's memory is queued
 *  Since: 0.1 */
GEMINI_API void *gemini_cupy_malloc(void *param, size_t size, int device);
/** Frees as gemini_torch_free() does.
 *  @param param  as for gemini_cupy_malloc()
 *  Since: 0.1 */
GEMINI_API void gemini_cupy_free(void *param, void *ptr, int device);
/** @} */

#ifdef __cplusplus
}
#endif
#endif

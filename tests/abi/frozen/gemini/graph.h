/* libgemini: CUDA graphs whose chunks do not fit beside each other on the device.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Its words and conventions are those of gemini.h. */
#ifndef GEMINI_GRAPH_H
#define GEMINI_GRAPH_H

#include <gemini.h>

#ifdef __cplusplus
extern "C" {
#endif

/** @defgroup graphs CUDA graphs
 *  A range of operators is captured once into a CUDA graph of the caller and replayed with one launch, even where its
 *  chunks do not fit on the device together. The graph itself copies chunks from host memory, beside the kernels, into
 *  frames that are set aside for it. A frame is device memory for one chunk. The graph's chunks take turns in the
 *  frames: each is copied as soon as the work on the chunk before it in the frame is done.
 *
 *      gemini_graph_begin(mgr, stream, bytes, &graph);
 *      cuStreamBeginCapture(native, ...);
 *      for each operator: gemini_acquire(mgr, what it reads, ..., stream); its kernels; gemini_release(...);
 *      cuStreamEndCapture(native, ...);
 *      gemini_graph_end(mgr, graph);
 *      for each replay: gemini_graph_enter(mgr, graph, stream); cuGraphLaunch(...); gemini_graph_leave(mgr, graph);
 *
 *  Chunks that a capture writes, and others that shall stay for all of it, are acquired on the device before the
 *  capture begins and released after it ends, and likewise around each replay. The graph only reads the other chunks.
 *  Between replays these live as all chunks do, except that they keep their places in host memory while the graph
 *  lives.
 *  @{ */
typedef struct gemini_graph_s *gemini_graph_t;
/** Sets device memory aside for a graph that is about to be captured from a stream, and evicts chunks for it. Ranges
 *  acquired and released on this stream before gemini_graph_end() are recorded as reads of the graph: the copies that
 *  they need become part of the capture, and nothing is computed or fetched now. On a stream in such a capture,
 *  gemini_op_begin() and gemini_op_end() only give names to messages.
 *  @param device_bytes  memory for chunks that take turns; only whole chunks of it count. A replay overlaps copies with
 *           kernels if it holds more than one operator's chunks
 *  @param graph_out  transferred to the caller; end with gemini_graph_destroy() or gemini_manager_close(). A manager
 *           has at most 256 at once
 *  @retval GEMINI_ERR_UNSUPPORTED  the simulated device has no graphs
 *  @retval GEMINI_ERR_STATE  the stream is being captured already, or another graph was begun on it and not ended
 *  @retval GEMINI_ERR_INVALID  device_bytes is less than a chunk, stream is GEMINI_STREAM_CALLER, or 256 graphs exist
 *  @retval GEMINI_ERR_OOM_DEVICE  the memory does not fit beside what is acquired, pinned and allocated, or no plan can
 *           be made with what is left
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_graph_begin(gemini_manager_t mgr, gemini_stream_t stream, uint64_t device_bytes,
                                              gemini_graph_t *graph_out) GEMINI_MUST_CHECK;
/** Says that the capture has ended. Ranges that are still acquired in it are released.
 *  @retval GEMINI_ERR_STATE  the stream is still being captured, or the graph has ended already; or the device refused
 *           a part of the capture, as an acquire or release has reported, and the graph can only be destroyed
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_graph_end(gemini_manager_t mgr, gemini_graph_t graph) GEMINI_MUST_CHECK;
/** Prepares a launch; call it before each, on the stream of the launch. The stream waits until host memory has the
 *  newest bytes of all that the graph reads: updates are done and device copies written back. Until
 *  gemini_graph_leave(), these chunks cannot be acquired on the device, nor on the host for writing. If nothing has
 *  changed since the last replay, the call costs a look at each chunk.
 *  @retval GEMINI_ERR_BUSY  a chunk is acquired on the device or for writing, pinned, or in use by another graph
 *  @retval GEMINI_ERR_STATE  the capture has not ended, the graph is entered already, a chunk that was acquired during
 *           the capture is not acquired now, or a parameter's bytes are its gradient's, or the other way round
 *  @retval GEMINI_ERR_IO  a chunk could not be read from its file
 *  Blocks if a chunk that was on the device since its last replay must leave it, or if one must come from a file.
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_graph_enter(gemini_manager_t mgr, gemini_graph_t graph, gemini_stream_t stream)
    GEMINI_MUST_CHECK;
/** Ends the use that gemini_graph_enter() began; call it after the launch. Others may use the chunks after the work
 *  queued on the stream of gemini_graph_enter().
 *  @retval GEMINI_ERR_STATE  the graph is not entered, or that stream is being captured
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_graph_leave(gemini_manager_t mgr, gemini_graph_t graph) GEMINI_MUST_CHECK;
/** Gives the device memory back, behind the last replay. The caller must not launch its CUDA graph any more. NULL is
 *  accepted.
 *  @retval GEMINI_ERR_BUSY  the graph is entered, or is being captured; nothing changed
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_graph_destroy(gemini_manager_t mgr, gemini_graph_t graph);
/** @} */

#ifdef __cplusplus
}
#endif
#endif

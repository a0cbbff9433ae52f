/* Operators that are chosen at run time, and the cache of their chunks. SPDX-License-Identifier: Apache-2.0
 *
 * A plan is made for iterations that do the same. Some do not: in a mixture of experts, a router chooses a few of many
 * experts for each token, and the next token needs others. A program says so where it begins such an operator. These
 * operators are no part of the record, so iterations that choose differently are of one kind and follow one plan, which
 * is made of what they have in common. Chunks that the plan does not know are a *cache* in the frames that it leaves:
 * a chosen operator's acquire finds its chunks there, or fetches them on demand.
 *
 * The plan's chunks come first: of the frames it takes what it needs, but for those of two chosen operators, where
 * there is room for that. When a frame is needed, chunks of the cache leave before those of the plan, in the order of
 * gemini_config_t.cache_policy. A program that can predict what will be chosen says so by gemini_hint(), within the
 * iteration: these chunks are fetched ahead, others of the cache make room for them, and they leave after all others
 * until they are used or the iteration ends. A wrong prediction costs a fetch and nothing else. docs/policy.md ("The
 * cache") describes the policies, docs/design.md ("Chosen operators") the rest.
 */
#ifndef GEMINI_CHOSEN_H
#define GEMINI_CHOSEN_H

#include <gemini.h>

#ifdef __cplusplus
extern "C" {
#endif

/** @defgroup chosen Chosen operators
 *  @{ */
/** Opens an operator that the caller has chosen at run time, such as an expert that a router has chosen. Other
 *  iterations of the same kind may leave it out, or have others in its place, which is no departure. Everything that it
 *  acquires is fetched on demand; what all iterations of the kind use belongs into operators of gemini_op_begin().
 *  gemini_op_end() closes it.
 *  @param name, stream  as for gemini_op_begin()
 *  @retval GEMINI_ERR_STATE  as for gemini_op_begin()
 *  @retval GEMINI_ERR_UNSUPPORTED  the manager has sharded arenas (gemini/group.h), of which ranks gather the same
 *  Threads: as gemini_op_begin(). Since: 0.1 */
GEMINI_API gemini_status_t gemini_op_begin_chosen(gemini_manager_t mgr, const char *name, gemini_stream_t stream)
    GEMINI_MUST_CHECK;
/** Says how important it is that chunks of chosen operators stay on the device. It is how a program brings a policy of
 *  its own, from statistics of its router, say: of chunks with different priorities the one with the lower leaves
 *  first, of equal ones gemini_config_t.cache_policy decides. Chunks that the plan knows do not heed it.
 *  @param accesses  object and range; mode and tier are ignored; borrowed until return. Whole chunks get the priority,
 *           also where they have neighbours of the range; the last call that names a chunk counts
 *  @param count  0 to 2^20
 *  @param priority  0, which all chunks have at first, to 255
 *  @retval GEMINI_ERR_INVALID  a value is out of range; nothing changed
 *  Does not wait and moves nothing. Since: 0.1 */
GEMINI_API gemini_status_t gemini_priority_set(gemini_manager_t mgr, const gemini_access_t *accesses, uint64_t count,
                                               uint32_t priority) GEMINI_MUST_CHECK;
/** @} */

#ifdef __cplusplus
}
#endif
#endif

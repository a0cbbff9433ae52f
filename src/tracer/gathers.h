/* Gathers ahead of use: records which chunks of sharded parameters the operators of an iteration use, and in later
 * iterations of the same kind gathers them before they are needed.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Everything here is decided from the names and phases of operators and from the sharded chunks that they use, and from
 * a number of frames on which the ranks agree when a kind of iteration has been recorded. So all ranks decide the same,
 * whatever differs in their memory, their times and their plans. Operators that use no sharded parameters do not count:
 * a rank may have more of them than others.
 *
 * Threads: the manager's lock is held in every call, unless said otherwise. */
#ifndef GMI_GATHERS_H
#define GMI_GATHERS_H

#include "core/manager.h"
#include "tracer/tracer.h"

enum { GMI_SETTLE_RUNS = 2 }; /* iterations under a plan after which times are taken again */
struct gmi_gathers;
gemini_status_t gmi_gathers_open(struct gmi_gathers **gathers_out);
void gmi_gathers_close(struct gmi_gathers *g);                   /* NULL is accepted */
void gmi_gathers_forget(struct gmi_gathers *g);                  /* the arenas changed */
void gmi_gathers_begin(gmi_manager_t *m, struct gmi_gathers *g); /* of an iteration */
/* Queues the gathers that belong before the operator. A failure is final: this rank has not gathered what others
 * have. */
gemini_status_t gmi_gathers_op_begin(gmi_manager_t *m, struct gmi_gathers *g, const char *name, uint32_t phase);
/* index: the operator's in the trace. An end that fails behind this is made again. */
void gmi_gathers_op_end(gmi_manager_t *m, struct gmi_gathers *g, uint32_t index);
/* At the end of an iteration. Posts it, for the ranks to compare (chunk/group_check.h). After one of a new kind, agrees
 * with the other ranks on frames, and blocks. trace: of the iteration; gets the frames that gathered parameters take
 * from now on in each of its operators. PEER: another rank has used other chunks, in this iteration or the last one.
 * BUSY, OOM_SYSTEM: the call can be repeated. What it and gmi_gathers_choose() have done together with other ranks is
 * not done again, as they do not repeat it. */
gemini_status_t gmi_gathers_end(gmi_manager_t *m, struct gmi_gathers *g, gmi_trace_t *trace);
/* STATE: another rank may know of the iteration's end already, so no operator may be added to it. */
gemini_status_t gmi_gathers_may_go_on(const struct gmi_gathers *g);
/* After gmi_gathers_end(): is it time to choose how many frames hold what the iteration's kind gathers, as an arena is
 * GEMINI_ZERO_AUTO? If so, all ranks of its group choose. trace: of the iteration, with its times; as of
 * gmi_gathers_end(). Blocks. */
bool gmi_gathers_choice_due(gmi_manager_t *m, const struct gmi_gathers *g);
gemini_status_t gmi_gathers_choose(gmi_manager_t *m, struct gmi_gathers *g, gmi_trace_t *trace);
/* After gmi_gathers_end(), until the next iteration begins: lists the gathers of further iterations of this kind in a
 * trace that has the operators of the iteration. */
gemini_status_t gmi_gathers_list(gmi_manager_t *m, struct gmi_gathers *g, gmi_trace_t *trace);
/* Does the iteration follow a recorded one, and is the operator at hand one before which the group's chunks were
 * gathered? Then they stay gathered until they are in the way. */
bool gmi_gathers_follow(const struct gmi_gathers *g, uint32_t group);
/* An operator is about to gather chunks on demand. If it is not the one that the followed kind has here, the iteration
 * departs now, and what that kind has gathered ahead leaves, unless another kind has it here: the frames may be needed.
 * All ranks call it at the same points. index: of the operator in the trace. */
gemini_status_t gmi_gathers_meet(gmi_manager_t *m, struct gmi_gathers *g, uint32_t index);
/* An operator uses a range of a sharded arena. Any thread, no lock of the manager's: the caller excludes other
 * calls. */
void gmi_gathers_touch(gmi_manager_t *m, struct gmi_gathers *g, uint32_t arena, uint64_t offset, uint64_t size);

#endif

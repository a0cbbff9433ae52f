/* Updates that are speculated: new values beside the old ones, in spare host slots.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The caller holds the manager's lock. gmi_spec_drop() of one unit is in chunk.h, which writes of a chunk call. */
#ifndef GMI_SPECULATE_H
#define GMI_SPECULATE_H

#include "chunk/deferred.h"

/* Speculates the units of an update's range for which there is spare memory and whose chunks need no move. The walk is
 * checked, has its unit and its gaps, and ends with the call. */
void gmi_speculate(gmi_walk_t *k, uint32_t stream);
/* Takes over the values of a piece of an accepted update, if they are speculated; else false, and it is to be run.
 * device: the plan has it run on the device, and no room was made for slots on the host. */
bool gmi_spec_take(gmi_walk_t *k, const gmi_piece_t *p, bool device);
void gmi_specs_drop(gmi_manager_t *m);                 /* all */
void gmi_specs_room(gmi_manager_t *m, uint32_t count); /* the last ones, until count slots are free or none is left */

/* ---- chunk/passes.c */
/* Is the piece a whole unit, of which the update reads and writes nothing else? */
bool gmi_piece_is_unit(const gmi_walk_t *k, const gmi_piece_t *p);
/* The job of a unit that writes the new values of chunk i of the piece to slots[i], or in place if that is GMI_NONE;
 * its slots are not in use yet. NULL: no memory for it. */
struct gmi_job *gmi_job_beside(gmi_walk_t *k, const gmi_piece_t *p, const uint32_t *slots);
/* The job of the second pass of a unit whose first one has written to slots[i], where that is not GMI_NONE; its slots
 * are not in use yet. NULL: bytes of it have left the host since, or no memory; nothing has changed. */
struct gmi_job *gmi_job_of_states(gmi_walk_t *k, const gmi_piece_t *p, const uint32_t *slots);
void gmi_job_drop(struct gmi_job *job); /* one whose slots are not in use; NULL is allowed */
/* Counts the job in its slots, those of results first, and lists what it waits for. */
void gmi_job_use_slots(const gmi_walk_t *k, const gmi_piece_t *p, const uint32_t *slots, struct gmi_job *job);
/* Does the update write the chunk without reading what it writes? */
bool gmi_chunk_is_result(const gmi_walk_t *k, const gmi_chunk_t *c);
/* Can a unit have two passes? Then its results lie in chunks of their own, or in those of the gradients alone. */
bool gmi_unit_has_passes(const gmi_walk_t *k);
/* Queues the piece on the host, in two passes. False: it cannot have two, or there is no spare memory for it; nothing
 * has changed but where bytes are. */
bool gmi_piece_in_passes(gmi_walk_t *k, gmi_piece_t *p);

#endif

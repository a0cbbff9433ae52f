/* Host memory that is committed ahead of its use, by a thread of its own.
 *
 * To commit memory takes the system 13 ms for 256 MiB, and several times that where a virtual machine has not used it
 * before; and a program's first iteration needs most of its budget. So while parts come into use one behind the other,
 * upwards or downwards, the thread commits those that follow, if they are homes of chunks: as many as have come into
 * use in a row, at most GMI_AHEAD_MOST; and behind these the ones that the caller expects to come into use. What is not
 * used then is given back after an iteration in which no part has come into use, or when an arena is destroyed.
 *
 * The caller holds the manager's lock, unless a comment says otherwise. The thread never takes it.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_HOST_AHEAD_H
#define GMI_HOST_AHEAD_H

#include "core/manager.h"

enum { GMI_AHEAD_MOST = 16 }; /* parts */

gemini_status_t gmi_ahead_open(gmi_manager_t *m); /* in gmi_host_open(). OOM_SYSTEM: no memory for records */
void gmi_ahead_close(gmi_manager_t *m);           /* in gmi_host_close(): ends the thread; the reserve has the memory */
/* Encloses the call that commits a part, or more of it. The first blocks while the thread is at work on the part, of
 * which all or nothing is committed then, and returns whether that is so many bytes; in_use: it has come into use. */
bool gmi_ahead_take(gmi_manager_t *m, uint64_t part, uint64_t bytes);
void gmi_ahead_taken(gmi_manager_t *m, uint64_t part, bool in_use);
void gmi_ahead_expect(gmi_manager_t *m, uint64_t part); /* it will come into use; no effect if it has, or is queued */
void gmi_ahead_iteration(gmi_manager_t *m);             /* an iteration begins */
/* Gives all memory back that is committed and not taken. Blocks while the thread is at work. */
void gmi_ahead_drop(gmi_manager_t *m);
/* Blocks until nothing is left to commit; returns the bytes that are committed and not taken. For tests. */
uint64_t gmi_ahead_idle(gmi_manager_t *m);

#endif

/* The ranks of a group compare what they have done in an iteration, while they go on.
 * SPDX-License-Identifier: Apache-2.0
 *
 * At the end of an iteration each rank posts a digest. A thread of the group exchanges it with the other ranks', which
 * takes until the last of them has ended the iteration. If they differ, the threads find the first operator that does,
 * and every communicator of the group fails with it and its chunk on both sides. Nobody waits for that but an exchange
 * of the library or the caller, which comes behind it, and the post of the next iteration. */
#ifndef GMI_GROUP_CHECK_H
#define GMI_GROUP_CHECK_H

#include "chunk/group.h"

/* An operator that uses chunks of the group: hashes of these, and of its name and phase. text: where its words begin in
 * the journal's. */
enum { GMI_JOURNAL_TEXT_BYTES = 136 /* of an operator's words, with the NUL */ };
typedef struct gmi_journal_op {
  uint64_t chunks, named;
  uint64_t text;
} gmi_journal_op_t;
/* The operators of an iteration. It does not change once it is posted. users: Atomic, references; the last one to drop
 * it frees it. */
typedef struct gmi_journal {
  _Atomic uint32_t users;
  uint32_t op_count;
  uint64_t layout;    /* digest of the group's arenas */
  uint64_t operators; /* digest of the chunks of all operators */
  gmi_journal_op_t *ops;
  char *texts;
} gmi_journal_t;
/* Returns one with room for so many operators and bytes of texts, and one user; NULL: no memory. */
gmi_journal_t *gmi_journal_new(uint32_t op_count, uint64_t text_bytes);
void gmi_journal_drop(gmi_journal_t *journal); /* NULL is accepted */

/* Starts the thread; a group of one rank has none. Before other threads know the group. */
gemini_status_t gmi_group_check_open(gmi_group_t *g);
/* Posts the end of an iteration, and what the group has queued since the last one. plan: digest of the plan of gathers
 * that the iteration's kind has; 0: it is a new kind. journal: gets another user. Waits until the ranks have ended the
 * iteration before. The caller holds the manager's lock. */
gemini_status_t gmi_group_check_post(gmi_manager_t *m, gmi_group_t *g, gmi_journal_t *journal, uint64_t plan);
/* Waits until what was posted has been compared. Fails as the group has failed. Any thread, with or without the
 * lock. */
gemini_status_t gmi_group_check_settle(gmi_group_t *g);
/* Ends the thread, behind what was posted. No other call may run. */
void gmi_group_check_close(gmi_group_t *g);

#endif

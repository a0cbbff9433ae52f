/* Loads of ranges from files, and gradients that reuse their parameters' bytes.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_DATA_H
#define GMI_DATA_H

#include "chunk/arena.h"
#include "core/manager.h"

/* Zeros the bytes that hold gradients of the reusing arena a, which then hold their parameters again. BUSY: some of the
 * chunks are acquired. Lock held. */
gemini_status_t gmi_gradients_drop(gmi_manager_t *m, gmi_arena_t *a);

/* Claims all chunks of the range, or none: from here on no other call can make a load of it BUSY, until gmi_load_end().
 * Each chunk's deferred pieces are queued first; a callback that this runs may use the chunks that are not claimed yet,
 * hence the checks at each claim. Lock held. */
gemini_status_t gmi_load_begin(gmi_manager_t *m, const gmi_range_t *r);
void gmi_load_end(gmi_manager_t *m, const gmi_range_t *r);
/* Reads a range, which lies in one that was claimed and whose arena is not sharded, from a file. As gemini_load();
 * releases the lock during I/O. */
gemini_status_t gmi_load_claimed(gmi_manager_t *m, const gmi_range_t *r, int fd, uint64_t fd_offset);

#endif

/* Chunks in files: transfers. All but what says otherwise: the lock is held.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_FILES_H
#define GMI_FILES_H

#include "chunk/chunk.h"
#include "core/manager.h"

extern const struct gmi_sys *gmi_files_sys; /* of managers opened from now on; for tests. NULL: the system's own */
gemini_status_t gmi_files_open(gmi_manager_t *m);
uint32_t gmi_files_engine(gmi_manager_t *m); /* GEMINI_FILE_ENGINE_*; AUTO: there is no file tier */
void gmi_files_close(gmi_manager_t *m);
gemini_status_t gmi_files_cut(gmi_manager_t *m, uint64_t block_bytes); /* no chunk has a block */
/* Start a transfer between the chunk's slot and its block, or a new one. It counts as work on the slot. */
gemini_status_t gmi_file_write(gmi_manager_t *m, gmi_chunk_t *c, uint32_t reason);
gemini_status_t gmi_file_read(gmi_manager_t *m, gmi_chunk_t *c, uint32_t reason);
void gmi_files_poll(gmi_manager_t *m); /* notes what finished transfers did */
/* The same. Fails when of's bytes did not come; of NULL: when a write failed. */
gemini_status_t gmi_files_reap(gmi_manager_t *m, gmi_chunk_t *of);
void gmi_file_supersede(gmi_chunk_t *c);              /* its bytes are about to be overwritten elsewhere */
void gmi_file_forgive(gmi_chunk_t *c);                /* nobody wants any more what could not be read */
void gmi_file_drop(gmi_manager_t *m, gmi_chunk_t *c); /* its block goes; its bytes are elsewhere, too */
/* The same for a block that its record has lost already; GMI_NONE: it had none, or it is being read. */
void gmi_file_drop_block(gmi_manager_t *m, gmi_chunk_t *c, uint32_t block);
void gmi_files_shrink(gmi_manager_t *m, uint64_t bytes); /* to so many, as far as no bytes are lost */
gemini_status_t gmi_files_resize(gmi_manager_t *m, uint64_t bytes);
/* Host memory that transfers will use from now on, or not any more (then none uses it). */
void gmi_files_buffer(gmi_manager_t *m, void *base, uint64_t size, bool add);

#endif

/* The file tier: transfers between slots and blocks of files. The caller holds the manager's lock, unless a comment
 * says otherwise.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_FILES_H
#define GMI_FILES_H

#include "chunk/chunk.h"
#include "core/manager.h"

/* System calls for managers opened from now on, for tests to fail them; NULL: the system's own. */
extern const struct gmi_sys *gmi_files_sys;
gemini_status_t gmi_files_open(gmi_manager_t *m);
uint32_t gmi_files_engine(gmi_manager_t *m);              /* GEMINI_FILE_ENGINE_*; AUTO: there is no file tier */
uint32_t gmi_files_engine_wanted(const gmi_manager_t *m); /* GMI_ENGINE_*, for stores */
void gmi_files_close(gmi_manager_t *m);
gemini_status_t gmi_files_cut(gmi_manager_t *m, uint64_t block_bytes); /* sets the block size; no chunk has a block */
/* Start a transfer: a write to a new block, or a read from the chunk's block, to or from the chunk's slot. It counts as
 * work on the slot. A read makes the host copy valid, behind that work. */
gemini_status_t gmi_file_write(gmi_manager_t *m, gmi_chunk_t *c, uint32_t reason);
gemini_status_t gmi_file_read(gmi_manager_t *m, gmi_chunk_t *c, uint32_t reason);
void gmi_files_poll(gmi_manager_t *m); /* applies finished transfers to their chunks' records */
/* The same, and then reports a failure once: of the last read of `of`; NULL: of a write. */
gemini_status_t gmi_files_reap(gmi_manager_t *m, gmi_chunk_t *of);
void gmi_file_supersede(
    gmi_chunk_t *c);                   /* the chunk gets other bytes: its transfer under way does not matter any more */
void gmi_file_forgive(gmi_chunk_t *c); /* forgets the error of a failed read */
void gmi_file_drop(gmi_manager_t *m, gmi_chunk_t *c); /* gives back its block; its bytes are valid in another tier */
/* The same for a block that the chunk's record has lost already. GMI_NONE: there is none, and the block of
 * a write under way, whose bytes are now outdated, must not become the chunk's. */
void gmi_file_drop_block(gmi_manager_t *m, gmi_chunk_t *c, uint32_t block);
/* Gives blocks back until at most `bytes` are in files, or only blocks are left that hold the only copy of their
 * chunk. */
void gmi_files_shrink(gmi_manager_t *m, uint64_t bytes);
gemini_status_t gmi_files_resize(gmi_manager_t *m, uint64_t bytes);
/* Registers host memory as a buffer of transfers, or removes it when no transfer uses it. */
void gmi_files_buffer(gmi_manager_t *m, void *base, uint64_t size, bool add);

#endif

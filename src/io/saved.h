/* The files of checkpoints, for readers that do not own them. SPDX-License-Identifier: Apache-2.0
 *
 * A store (store.h) locks the files of its checkpoint and adopts their blocks. The calls here only read, so any number
 * of processes can use one checkpoint at the same time; what is read is compared with the checksums of its index.
 * directories is a list as of gmi_store_config_t. Threads: any, but one at a time for one gmi_saved_t. All calls block
 * on I/O. */
#ifndef GMI_SAVED_H
#define GMI_SAVED_H

#include "io/index.h"

typedef struct gmi_saved {
  const gmi_sys_t *sys;
  const char *directories; /* borrowed until gmi_saved_close() */
  char *name;              /* owned */
  char *index_path;        /* owned */
  gmi_index_t index;
  int fd;        /* of the file that was read last; -1: none is open */
  uint32_t file; /* its number */
  char *fd_path; /* owned */
} gmi_saved_t;

/* Reads the index of the checkpoint `name`, and looks whether the files have all blocks that it names. NOT_FOUND: there
 * is no index; FORMAT: it is damaged, or a file is missing or too short. The message names file and reason. */
gemini_status_t gmi_saved_open(const gmi_sys_t *sys, const char *directories, const char *name, gmi_saved_t *saved_out);
/* Reads the first size_bytes bytes of the block of an entry, as many as were written, and compares its checksum. */
gemini_status_t gmi_saved_read(gmi_saved_t *saved, uint32_t entry, void *buffer, uint64_t size_bytes);
void gmi_saved_rest(gmi_saved_t *saved);  /* closes what the last call has left open; a later read opens it again */
void gmi_saved_close(gmi_saved_t *saved); /* of all zeros: does nothing */

/* Returns the path of a file: "<directory n>/<name><end>"; NULL: there is no memory, or no such directory. The caller
 * frees it. */
char *gmi_saved_path(const char *directories, uint32_t n, const char *name, const char *end);
/* Removes the files of the checkpoint `name`, as far as they exist. */
void gmi_saved_remove(const gmi_sys_t *sys, const char *directories, const char *name);
/* Removes files of the checkpoints that are named `<name>.<number>-<number>.<number>`, whose first number is at most
 * `most`, until gmi_now_ns() is until_ns. True: there are no more, or none that it can remove. */
bool gmi_saved_sweep(const gmi_sys_t *sys, const char *directories, const char *name, uint64_t most, uint64_t until_ns);

/* Locks "<name>.lock" in the first directory, which is made if there is none, and stays. BUSY: another process has it.
 * A file system without locks is taken for one on which nobody else has it; *error_out: why it has none, or 0. */
gemini_status_t gmi_saved_lock(const gmi_sys_t *sys, const char *directories, const char *name, int *fd_out,
                               int *error_out);
void gmi_saved_unlock(const gmi_sys_t *sys, int fd); /* -1: does nothing */

#endif

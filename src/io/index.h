/* The index file: names the blocks of a commit, for a later process. SPDX-License-Identifier: Apache-2.0
 *
 * Layout; all numbers are little-endian:
 *
 *   0  "gmiblock"               40  uint32 kept blocks            80             their entries, 24 bytes each:
 *   8  uint32 version, 1        44  uint32 1: entries have sums                    uint64 key, the caller's
 *  12  uint32 files             48  uint64 bytes of the blob                       uint64 generation
 *  16  uint64 bytes in all      56  uint64 number of the commit                    uint32 block
 *  24  uint64 bytes of a block  64  uint64 highest generation                      uint32 CRC-32C
 *  32  uint32 blocks            72  uint64 0                      then           the caller's blob
 *  36  uint32 0                                                   last 4 bytes   CRC-32C of all before */
#ifndef GMI_INDEX_H
#define GMI_INDEX_H

#include <stdbool.h>
#include <stdint.h>

#include "gemini.h"
#include "io/sys.h"

typedef struct gmi_index_entry {
  uint64_t key, generation;
  uint32_t block, checksum;
} gmi_index_entry_t;

typedef struct gmi_index {
  uint64_t block_bytes;
  uint32_t file_count, block_count;
  bool checksums;       /* entries hold the blocks' checksums; false: each holds 0 */
  uint64_t number;      /* of the commit, counted from 1 */
  uint64_t generations; /* the highest generation of any block of the store */
  uint32_t checksum;    /* of an index that was read: the file's */
  uint32_t entry_count;
  gmi_index_entry_t *entries;
  void *blob;
  uint64_t blob_bytes;
} gmi_index_t;

/* Reads the whole file and checks it: checksum, ranges, and that entries name existing blocks, each once. NOT_FOUND:
 * there is no file. FORMAT: the message names file and offset. IO, OOM_SYSTEM. index_out owns its arrays; free them
 * with gmi_index_free(). */
gemini_status_t gmi_index_read(const gmi_sys_t *sys, const char *path, gmi_index_t *index_out);
/* Replaces the file: writes a new one at the path `beside`, syncs it and renames it to path. A file system of a network
 * may report that a rename failed which was done; so after a failure of it the file at path is compared with the new
 * one. *in_force_out: the new file is at path, or, after a failure, may be, as the file there cannot be read. Otherwise
 * the old file stays. IO, OOM_FILE, OOM_SYSTEM. The directory is not synced: the caller does that, and so can tell a
 * failure that leaves the old file from one after which either may survive. */
gemini_status_t gmi_index_write(const gmi_sys_t *sys, const char *path, const char *beside, const gmi_index_t *index,
                                bool *in_force_out);
void gmi_index_free(gmi_index_t *index);

#endif

/* The records that the store's files share: store.c (blocks and files), transfer.c (requests and sums), commit.c
 * (checkpoints). SPDX-License-Identifier: Apache-2.0
 *
 * Lock order: store.admin, then store.lock. sums.lock and the engine's lock are innermost; neither store lock is held
 * when they are taken. */
#ifndef GMI_STORE_INTERNAL_H
#define GMI_STORE_INTERNAL_H

#include <pthread.h>

#include "io/blockfile.h"
#include "io/index.h"
#include "io/store.h"

/* Flags of a block. At most one of WRITING, READABLE and FAILED is set; none of them: taken and never written, or free.
 * DIRTY, SYNCING and SUSPECT exist with keep only. */
enum {
  BLOCK_TAKEN = 1,     /* by a caller of gmi_store_take() that has not given it back */
  BLOCK_COMMITTED = 2, /* named by the last commit: must not be overwritten or handed out */
  BLOCK_PENDING = 4,   /* named by the commit that is being made */
  BLOCK_WRITING = 8,
  BLOCK_READABLE = 16,  /* its bytes are those of its generation */
  BLOCK_FAILED = 32,    /* its last write failed */
  BLOCK_SUMMED = 64,    /* checksum is that of its generation */
  BLOCK_PREVIOUS = 128, /* previous is the checksum of the generation before */
  BLOCK_DIRTY = 256,    /* written since the last sync began */
  BLOCK_SYNCING = 512,  /* written before the sync began that is under way */
  BLOCK_SUSPECT = 1024, /* its sync failed: the bytes on the disk are unknown */
  BLOCK_USED = 2048     /* counted as used, and its bit in the map of free blocks is clear */
};
/* A block's record. generation counts writes and is never reset while the store is open. */
typedef struct gmi_block {
  uint64_t generation;
  uint32_t checksum, previous;
  uint16_t flags, readers;
} gmi_block_t;

/* One file of the store. Block b lies in file b % file_count, at position b / file_count: neighbouring blocks lie on
 * different drives. */
typedef struct gmi_stripe {
  gmi_blockfile_t file;
  uint32_t engine_file; /* the file's index in the engine */
  uint32_t used;        /* blocks of this file with BLOCK_USED */
  uint32_t words;       /* length of free */
  uint32_t first;       /* no word of free before this one has a bit set */
  uint64_t *free;       /* bit map by position: set for blocks that can be taken */
} gmi_stripe_t;

enum { GMI_SUMMING_THREADS_LIMIT = 4 };
/* Requests whose blocks wait for a summing thread. Index 0: not urgent, 1: urgent. */
typedef struct gmi_sums {
  pthread_mutex_t lock; /* Guards stop and the lists. thread_count and threads change only at open */
  pthread_cond_t more;  /* a request was queued, or stop was set */
  bool stop;
  gmi_block_request_t *first[2], **end[2];
  uint32_t thread_count;
  pthread_t threads[GMI_SUMMING_THREADS_LIMIT];
} gmi_sums_t;

struct gmi_store {
  const gmi_sys_t *sys;
  uint64_t block_bytes;
  bool checksum, keep;
  gmi_engine_t *engine;
  gmi_sums_t sums;
  char *index_path, *index_beside; /* NULL unless keep */

  /* Serialises resizes and commits, which block on I/O; held throughout them, and taken before lock. Guards what
   * follows, and the sizes of the files. */
  pthread_mutex_t admin;
  gmi_note_t note;
  uint64_t number;       /* of the last commit that was attempted */
  bool index_there;      /* an index exists: close must leave it and the files in place */
  bool names_synced;     /* the directory entries of the blocks' files are known to be on the disk */
  gmi_index_t committed; /* the last commit; number 0: there is none */
  gmi_kept_t *kept;      /* its blocks, in the form that callers see */

  /* Guards what follows, briefly: never held during I/O or while done runs. file_count and the stripes' file and
   * engine_file do not change after open and need no lock. */
  pthread_mutex_t lock;
  pthread_cond_t idle;  /* outstanding has become 0 */
  uint64_t outstanding; /* requests whose done has not returned */
  uint32_t block_count; /* blocks that have records and space in the files */
  uint32_t wanted;      /* blocks below this one can be taken; smaller than block_count after a resize to fewer blocks,
                           until taken blocks behind it have been given back */
  uint32_t used;        /* blocks with BLOCK_USED */
  bool trim_due;        /* a block behind wanted has become unused: gmi_store_trim_due() */
  gmi_block_t *blocks;
  gmi_store_figures_t shown; /* copy of the files' figures, for gmi_store_figures(), which must not wait for admin */
  uint32_t file_count;
  gmi_stripe_t stripes[];
};

/* Brings BLOCK_USED, the counts and the map of free blocks in line with a block's other flags and readers. Called with
 * lock held after each change of these. */
void gmi_block_settle(gmi_store_t *store, uint32_t block);
/* Gives the space of blocks behind `wanted` that have become unused back to the file system. Called without locks by a
 * thread that may have made one unused and by every holder of admin after it has released it: a caller that finds admin
 * held leaves the work to its holder. A failure costs only disk space, so it is noted rather than returned. */
void gmi_store_trim_due(gmi_store_t *store);

gemini_status_t gmi_sums_open(gmi_store_t *store);
void gmi_sums_close(gmi_store_t *store);

/* For gmi_store_open(), once the files are locked. gmi_commit_read() reads the last commit, if there is one, and raises
 * *block_count_io to the number of blocks that it needs. When records and space exist, gmi_commit_adopt() marks its
 * blocks as taken. */
gemini_status_t gmi_commit_read(gmi_store_t *store, uint32_t *block_count_io);
void gmi_commit_adopt(gmi_store_t *store);

#endif

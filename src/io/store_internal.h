/* What the parts of the store share: store.c (blocks and files), transfer.c (requests and sums), commit.c (what is
 * kept). SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_STORE_INTERNAL_H
#define GMI_STORE_INTERNAL_H

#include <pthread.h>

#include "io/blockfile.h"
#include "io/index.h"
#include "io/store.h"

enum {
  BLOCK_TAKEN = 1,
  BLOCK_COMMITTED = 2, /* by the last commit */
  BLOCK_PENDING = 4,   /* by the commit that is being made */
  BLOCK_WRITING = 8,
  BLOCK_READABLE = 16,  /* its bytes are those of its generation */
  BLOCK_FAILED = 32,    /* the last write did */
  BLOCK_SUMMED = 64,    /* checksum is that of its generation */
  BLOCK_PREVIOUS = 128, /* previous is that of the generation before */
  BLOCK_DIRTY = 256,    /* written since the last sync began; these three with keep only */
  BLOCK_SYNCING = 512,  /* written before the sync began that is under way */
  BLOCK_SUSPECT = 1024, /* its sync failed: what the disk has is not known */
  BLOCK_USED = 2048     /* counted, and not in the map of free ones */
};
typedef struct gmi_block {
  uint64_t generation;
  uint32_t checksum, previous;
  uint16_t flags, readers;
} gmi_block_t;

/* Block b is the (b / files)th of file b % files. */
typedef struct gmi_stripe {
  gmi_blockfile_t file;
  uint32_t engine_file;
  uint32_t used;  /* blocks */
  uint32_t words; /* of free */
  uint32_t first; /* no word before has a bit */
  uint64_t *free; /* a bit for each block of the file that can be taken */
} gmi_stripe_t;

enum { GMI_SUMMING_THREADS_LIMIT = 4 };
/* Requests whose blocks are to be summed, by urgency. */
typedef struct gmi_sums {
  pthread_mutex_t lock; /* guards what follows, except threads */
  pthread_cond_t more;
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

  pthread_mutex_t admin; /* Held through a resize or a commit; taken before lock. Guards what follows. */
  gmi_note_t note;
  uint64_t number;       /* of the last commit that was tried */
  bool index_there;      /* files and index are to stay */
  bool names_synced;     /* of the chunks' files */
  gmi_index_t committed; /* the last commit, when number in it is not 0 */
  gmi_kept_t *kept;      /* its blocks, as the caller sees them */

  pthread_mutex_t lock; /* Guards what follows; never held while bytes move, nor in done */
  pthread_cond_t idle;
  uint64_t outstanding; /* requests whose done has not returned */
  uint32_t block_count; /* that have space */
  uint32_t wanted;      /* that can be taken: less than have space while taken ones are in the way */
  uint32_t used;
  gmi_block_t *blocks;
  gmi_store_figures_t shown; /* what of the files is of interest */
  uint32_t file_count;
  gmi_stripe_t stripes[];
};

/* With the lock held: a block's flags or readers have changed; is it free, or not any more? */
void gmi_block_settle(gmi_store_t *store, uint32_t block);
/* With admin held: gives back to the file system what is wanted no more. */
gemini_status_t gmi_store_trim(gmi_store_t *store);

gemini_status_t gmi_sums_open(gmi_store_t *store);
void gmi_sums_close(gmi_store_t *store);

/* At open, when the files are locked: reads the last commit, if there is one; block_count_io becomes at least what that
 * needs. Then, with space and records for so many: its blocks are taken. */
gemini_status_t gmi_commit_read(gmi_store_t *store, uint32_t *block_count_io);
void gmi_commit_adopt(gmi_store_t *store);

#endif

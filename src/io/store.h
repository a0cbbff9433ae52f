/* Blocks of one size in files: where evicted chunks go. SPDX-License-Identifier: Apache-2.0
 *
 * Blocks are striped over the directories' files, one file in each; all space is reserved at open, so that a full disk
 * is met there and not in the middle of a step. Files have no name and vanish with the process however it ends; with
 * keep they have names and an index, and a later process can go on from the last commit.
 *
 * Every block has a generation, which counts its writes, and a checksum (CRC-32C over generation and bytes) taken when
 * it is written and compared when it is read: torn, stale and flipped blocks are GEMINI_ERR_FORMAT, with file, offset,
 * block and whose chunk it is. Both are kept in memory, and in the index of kept files, so that what is in a file never
 * vouches for itself. Sums of small blocks are computed by the engine's threads when the transfer is over; of large
 * ones by threads of the store, of writes while the bytes are on their way. Never by the caller.
 *
 * Knows the engine, not managers. Threads: any, except where it says otherwise. */
#ifndef GMI_STORE_H
#define GMI_STORE_H

#include <stdatomic.h>

#include "io/engine.h"

typedef struct gmi_store gmi_store_t;
#define GMI_BLOCK_NONE UINT32_MAX

typedef struct gmi_store_config {
  const char *directories; /* one or several, separated by ':'; borrowed until return */
  uint64_t block_bytes;    /* multiple of 512; O_DIRECT is used where it also is one of the file's alignment */
  uint32_t block_count;    /* reserved up front; may be 0 */
  uint32_t engine_kind;    /* GMI_ENGINE_* */
  uint32_t depth;          /* of the engine; 0 = default */
  bool checksum;           /* false: nothing is summed or compared */
  bool keep;
  /* Files are <directory n>/<checkpoint_name>.<n>.chunks and <first directory>/<checkpoint_name>.index. NULL unless
   * keep; borrowed until return. */
  const char *checkpoint_name;
  const gmi_sys_t *sys; /* NULL = gmi_sys_real */
} gmi_store_config_t;

typedef struct gmi_block_request gmi_block_request_t;
struct gmi_block_request {
  gmi_request_t io; /* the store fills it; results are in io.status and io.native_code */
  /* Set by the caller. Request, buffer and owner are the store's from submit until done is called. */
  uint32_t block;
  bool write, urgent;
  bool reserved[2];
  void *buffer;      /* size_bytes, aligned to 4096 */
  const char *owner; /* for messages: "chunk 3 of arena master"; NULL: nobody */
  void (*done)(
      gmi_block_request_t *request); /* on a thread of the engine or store, once; may submit others and free the
                                                 request; must not wait for the store */
  void *user;
  uint64_t
      size_bytes; /* at the block's begin, a multiple of 4096; 0: the whole block. A read: as many as were written */
  /* Result: when io.status is not OK, what happened, which file, offset, block, owner, checksums and generations. */
  char message[440];
  /* The store's own: */
  gmi_store_t *store;
  gmi_block_request_t *next;                      /* in the list of those to be summed */
  uint64_t generation, moved_bytes, summed_bytes; /* moved_bytes: size_bytes, or the block's */
  uint32_t checksum;                              /* of the bytes seen so far */
  uint32_t expected, previous;                    /* reads: of the block's generation, and of the one before */
  uint32_t private_flags;
  atomic_uint halves; /* transfer and sum, where they are done side by side, that are not over */
  gemini_status_t refusal;
};

/* INVALID: a value is out of range, or the directories' list is malformed. IO: a directory or file cannot be used.
 * OOM_FILE: there is not enough space, nothing is left behind. UNSUPPORTED: of the engine. With keep, too: FORMAT: the
 * index is damaged, or of blocks or directories other than these; BUSY: somebody else has the files open, and has not
 * closed them within two seconds. Blocks of the last commit then count as taken. Blocks. */
gemini_status_t gmi_store_open(const gmi_store_config_t *config, gmi_store_t **store_out);
/* Finishes what was submitted. Kept files without a commit are removed. NULL is accepted. Threads: no other call may
 * run. Blocks. */
void gmi_store_close(gmi_store_t *store);
/* As of the engine. */
gemini_status_t gmi_store_buffer_add(gmi_store_t *store, void *base, uint64_t size_bytes);
void gmi_store_buffer_remove(gmi_store_t *store, void *base, uint64_t size_bytes);
/* More or fewer blocks to take from. Fewer: what is free behind them goes back to the file system at once, what is
 * taken when it is given. OOM_FILE: there is no space for more; nothing changed. Blocks. */
gemini_status_t gmi_store_resize(gmi_store_t *store, uint32_t block_count);
/* The lowest free block of the file with the fewest taken ones; OOM_FILE when none is left. Until it is written, it
 * cannot be read. */
gemini_status_t gmi_store_take(gmi_store_t *store, uint32_t *block_out);
/* Nothing on it may be in flight. keep: what the last commit names stays until the next one. */
void gmi_store_give(gmi_store_t *store, uint32_t block);
/* Never blocks on I/O and never fails: what cannot be done fails through done. One write or several reads of a block
 * may be in flight: BUSY. A block that was not taken, was never written, or belongs to the last commit and is to be
 * written: STATE; that changes nothing. A write makes the block's bytes those of the buffer, or, when it fails, none:
 * it cannot be read then, and a caller that needs the old bytes until the new ones are safe writes to another block. */
void gmi_store_submit(gmi_store_t *store, gmi_block_request_t *request);
/* Submits a request whose done and user are free to be set here, and blocks until it is over. Returns its status, with
 * the message recorded (gmi_fail). Not in done. */
gemini_status_t gmi_store_wait(gmi_store_t *store, gmi_block_request_t *request);

/* ---- keep only */
typedef struct gmi_kept {
  uint32_t block;
  uint32_t reserved; /* 0 */
  uint64_t key;      /* the caller's */
} gmi_kept_t;
enum { GMI_BLOB_LIMIT_BYTES = 1 << 30 };
/* Makes what blocks name, with a caller's blob, the state that a later process finds: data are synced first, then the
 * index is replaced (written beside, synced, renamed, the directory synced): after a kill at any time the previous or
 * the new commit is there, whole. What the last commit names is neither handed out nor overwritten until the next one.
 * STATE: not a kept store, or a block is not taken, not written or named twice; BUSY: one is being written; IO,
 * OOM_FILE: the previous commit stays. Blocks whose sync failed have to be written again before they can be committed.
 * Blocks. */
gemini_status_t gmi_store_commit(gmi_store_t *store, const gmi_kept_t *blocks, uint32_t count, const void *blob,
                                 uint64_t blob_bytes);
/* Is what the disk has of this block not known, as a sync failed? Then it must be written again, to another block,
 * before it can be committed; it can be read, and its checksum says whether it is right. */
bool gmi_store_is_suspect(gmi_store_t *store, uint32_t block);
/* What the last commit says; arrays are the store's until the next commit or close. NOT_FOUND: there is none. STATE:
 * not a kept store. */
gemini_status_t gmi_store_committed(gmi_store_t *store, const gmi_kept_t **blocks_out, uint32_t *count_out,
                                    const void **blob_out, uint64_t *blob_bytes_out);

typedef struct gmi_store_figures {
  gmi_engine_figures_t engine;
  uint32_t files, blocks_used, block_count; /* used: taken, or of the last commit */
  uint32_t summing_threads;
  bool direct, reserved_up_front; /* of all files */
  uint64_t reserved_bytes;
  char note[200]; /* what is not as wished, for the log: "/mnt has no O_DIRECT: buffered"; "" */
} gmi_store_figures_t;
void gmi_store_figures(gmi_store_t *store, gmi_store_figures_t *figures_out);

#endif

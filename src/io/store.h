/* The file tier: blocks of one size in files, which hold the bytes of evicted chunks.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Blocks are striped over the directories, one file in each. All space is reserved at open, so that a full disk shows
 * there and not in the middle of a training step. By default the files have no names and vanish when the process ends,
 * however it ends. With `keep` they have names and an index, and a later process can continue from the last commit.
 *
 * Every block has a generation, which counts its writes, and a checksum (CRC-32C over generation and bytes), taken when
 * the block is written and compared when it is read. A torn, stale or corrupted block fails with GEMINI_ERR_FORMAT; the
 * message names file, offset, block and owner. Generation and checksum are held in memory, and in the index of kept
 * files, not beside the bytes: a stale block could otherwise vouch for itself. Small blocks are summed by the engine's
 * threads after the transfer, large ones by threads of the store, for writes while the transfer runs; never by the
 * caller.
 *
 * The store knows the engine, not managers. Threads: any, except where it says otherwise. */
#ifndef GMI_STORE_H
#define GMI_STORE_H

#include <stdatomic.h>

#include "io/engine.h"

typedef struct gmi_store gmi_store_t;
#define GMI_BLOCK_NONE UINT32_MAX

typedef struct gmi_store_config {
  const char *directories; /* one or several, separated by ':'; borrowed until return */
  uint64_t block_bytes;    /* multiple of 512; O_DIRECT is used where it is also a multiple of the file's alignment */
  uint32_t block_count;    /* blocks to reserve at open; may be 0 */
  uint32_t engine_kind;    /* GMI_ENGINE_* */
  uint32_t depth;          /* of the engine; 0 = default */
  bool checksum;           /* false: no checksums are taken or compared */
  bool keep;               /* files get names and can be committed */
  /* Files are <directory n>/<checkpoint_name>.<n>.chunks and <first directory>/<checkpoint_name>.index. NULL unless
   * keep; borrowed until return. */
  const char *checkpoint_name;
  const gmi_sys_t *sys; /* NULL = gmi_sys_real */
} gmi_store_config_t;

typedef struct gmi_block_request gmi_block_request_t;
struct gmi_block_request {
  gmi_request_t io; /* filled by the store, and first, so that the engine's request leads to this one; results are in
                       io.status and io.native_code */
  /* Set by the caller. The store owns request, buffer and owner from submit until it calls done. */
  uint32_t block;
  bool write, urgent;
  bool reserved[2];
  void *buffer;      /* size_bytes, aligned to 4096 */
  const char *owner; /* for messages: "chunk 3 of arena master"; NULL: none is named */
  /* Called once, on a thread of the engine or the store. May submit others and free the request; must not wait for the
   * store. */
  void (*done)(gmi_block_request_t *request);
  void *user;
  /* From the block's begin, a multiple of 4096; 0: the whole block. For a read, the size that was written. */
  uint64_t size_bytes;
  /* Result when io.status is not OK: what happened, with file, offset, block, owner, checksums and generations. */
  char message[440];
  /* Private to the store: */
  gmi_store_t *store;
  gmi_block_request_t *next;                      /* in the list of requests to be summed */
  uint64_t generation, moved_bytes, summed_bytes; /* moved_bytes: size_bytes, or the block's */
  uint32_t checksum;                              /* of the generation and the first summed_bytes bytes */
  uint32_t expected, previous;                    /* reads: checksum of the block's generation, and of the one before */
  uint32_t private_flags;
  atomic_uint halves;      /* Atomic: of transfer and concurrent sum, how many are not over. The last one finishes */
  gemini_status_t refusal; /* why the request was refused at submit */
};

/* INVALID: a value is out of range, or the list of directories is malformed. IO: a directory or file cannot be used.
 * OOM_FILE: there is not enough space; nothing is left behind. UNSUPPORTED: as gmi_engine_open(). With keep, also
 * FORMAT: the index is damaged, or was made with another block size or number of directories; BUSY: another process or
 * manager has the files open and did not close them within two seconds. With keep the blocks of the last commit start
 * out as taken. This call blocks. */
gemini_status_t gmi_store_open(const gmi_store_config_t *config, gmi_store_t **store_out);
/* Waits for all submitted requests. Checkpoint files without a commit are removed. NULL is accepted. Threads: no
 * other call may run. This call blocks. */
void gmi_store_close(gmi_store_t *store);
/* As gmi_engine_buffer_add() and gmi_engine_buffer_remove(). */
gemini_status_t gmi_store_buffer_add(gmi_store_t *store, void *base, uint64_t size_bytes);
void gmi_store_buffer_remove(gmi_store_t *store, void *base, uint64_t size_bytes);
/* Changes how many blocks there are to take. With fewer, the space of free blocks behind the new end goes back to the
 * file system at once, that of taken ones when they are given back. OOM_FILE: there is no space for more; nothing
 * changed. This call blocks. */
gemini_status_t gmi_store_resize(gmi_store_t *store, uint32_t block_count);
/* Takes the lowest free block of the file with the fewest used ones; OOM_FILE: none is left. The block cannot be read
 * until it has been written. */
gemini_status_t gmi_store_take(gmi_store_t *store, uint32_t *block_out);
/* Gives a block back. No request on it may be in flight. With keep, a block that the last commit names becomes free
 * only with the next commit. */
void gmi_store_give(gmi_store_t *store, uint32_t block);
/* Never blocks on I/O and never fails: a request that cannot be carried out fails through done. Of a block, either one
 * write or several reads may be in flight, else BUSY. STATE: the block was not taken, a read finds it never written, or
 * a write finds it in a commit; the block stays as it is. A write replaces the block's bytes; if it fails the block has
 * no valid bytes and cannot be read. A caller that needs the old bytes until the new ones are safe writes to another
 * block. */
void gmi_store_submit(gmi_store_t *store, gmi_block_request_t *request);
/* Submits a request, whose done and user this call sets, and blocks until it is over. Returns its status, with its
 * message recorded (gmi_fail). Must not be called in done. */
gemini_status_t gmi_store_wait(gmi_store_t *store, gmi_block_request_t *request);

/* ---- keep only */
typedef struct gmi_kept {
  uint32_t block;
  uint32_t reserved; /* 0 */
  uint64_t key;      /* the caller's */
} gmi_kept_t;
enum { GMI_BLOB_LIMIT_BYTES = 1 << 30 };
/* Makes these blocks, together with the caller's blob, the state that a later process finds. The files are synced
 * first, then the index is replaced (new file written, synced, renamed over the old one, directory synced): after a
 * kill at any time either the previous or the new commit is there, complete. A block that the last commit names is
 * neither handed out nor overwritten until the next commit. STATE: the store is not kept, or a block is not taken, not
 * written or named twice; BUSY: a block is being written; IO, OOM_FILE: the previous commit stays. A block whose sync
 * failed must be written again before it can be committed. This call blocks. */
gemini_status_t gmi_store_commit(gmi_store_t *store, const gmi_kept_t *blocks, uint32_t count, const void *blob,
                                 uint64_t blob_bytes);
/* Did a sync of this block fail, so that its bytes on the disk are unknown? Then its contents must be written again, to
 * another block, before they can be committed. The block can still be read; its checksum tells whether it is intact. */
bool gmi_store_is_suspect(gmi_store_t *store, uint32_t block);
/* The last commit. The arrays belong to the store and stay valid until the next commit or close. NOT_FOUND: there is no
 * commit. STATE: the store is not kept. */
gemini_status_t gmi_store_committed(gmi_store_t *store, const gmi_kept_t **blocks_out, uint32_t *count_out,
                                    const void **blob_out, uint64_t *blob_bytes_out);

typedef struct gmi_store_figures {
  gmi_engine_figures_t engine;
  uint32_t files, blocks_used, block_count; /* used: taken, being read or written, or in a commit */
  uint32_t summing_threads;
  bool direct, reserved_up_front; /* true: of every file */
  uint64_t reserved_bytes;
  char note[200]; /* limitations that were found, for the log: "/mnt has no O_DIRECT: buffered"; "": none */
} gmi_store_figures_t;
void gmi_store_figures(gmi_store_t *store, gmi_store_figures_t *figures_out);

#endif

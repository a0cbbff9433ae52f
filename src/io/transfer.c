/* Block requests: their transfers through the engine, and the checksums of their bytes.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A block request consists of one engine request (the transfer) and, with checksums, a checksum over generation and
 * bytes. A read is summed after its transfer. A write is summed while its transfer runs: the checksum does not go into
 * the file, so neither has to wait for the other. The request ends when both are over; `halves` counts them.
 *
 * Threads. gmi_store_submit() runs on the caller's thread and never sums. transferred() runs on a thread of the engine
 * when the transfer is over. Blocks of more than SMALL_BYTES are summed by up to GMI_SUMMING_THREADS_LIMIT threads of
 * the store (sum_blocks()); smaller ones on the engine's thread, where the sum costs less than waking another thread.
 * done is called on whichever of these threads ends the request.
 *
 * Locks. store.lock guards the blocks' records, sums.lock the queue of requests to be summed. Neither is held while the
 * other is taken, while bytes are summed, or while done runs. */
#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "base/thread.h"
#include "io/checksum.h"
#include "io/store_internal.h"

enum {
  SMALL_BYTES = 256 << 10, /* summed in some 20 microseconds */
  SLICE_BYTES = 4 << 20    /* summed in one go; the most that an urgent block waits for */
};
/* private_flags of a block request. */
enum {
  REQUEST_REFUSED = 1,  /* refusal holds the status; nothing is transferred */
  REQUEST_SUMMED = 2,   /* a write whose checksum is taken */
  REQUEST_COMPARED = 4, /* a read whose checksum must equal expected */
  REQUEST_PREVIOUS = 8  /* previous is the checksum of the generation before */
};

/* ---- error messages */
static uint64_t offset_of(const gmi_store_t *s, uint32_t block) { return block / s->file_count * s->block_bytes; }

static void describe_damage(gmi_block_request_t *r) {
  const gmi_store_t *s = r->store;
  char name[GMI_BLOCKFILE_NAME_BYTES];
  const char *owner = r->owner ? r->owner : "file tier";
  unsigned long long offset = offset_of(s, r->block), generation = r->generation;
  gmi_blockfile_name(&s->stripes[r->block % s->file_count].file, name);
  /* A lost write leaves the previous generation's bytes on the disk. They are recognised by their checksum, so that the
   * message can tell a stale block from a damaged one. */
  uint32_t older = gmi_crc32c(gmi_crc32c_generation(r->generation - 1), r->buffer, r->moved_bytes);
  if (r->private_flags & REQUEST_PREVIOUS && older == r->previous) {
    snprintf(r->message, sizeof r->message,
             "%.112s: block %u at offset %llu of %s is stale: it holds generation %llu (checksum %08x), not generation "
             "%llu (checksum %08x)",
             owner, r->block, offset, name, generation - 1, older, generation, r->expected);
  } else {
    snprintf(r->message, sizeof r->message,
             "%.112s: block %u at offset %llu of %s is damaged: its checksum is %08x, that of generation %llu is %08x",
             owner, r->block, offset, name, r->checksum, generation, r->expected);
  }
}

static void describe_failure(gmi_block_request_t *r) {
  const gmi_store_t *s = r->store;
  char name[GMI_BLOCKFILE_NAME_BYTES];
  const char *why = r->io.native_code && !*r->io.detail ? strerror(r->io.native_code) : r->io.detail;
  gmi_blockfile_name(&s->stripes[r->block % s->file_count].file, name);
  snprintf(r->message, sizeof r->message, "%.112s: could not %s block %u at offset %llu of %s: %.80s",
           r->owner ? r->owner : "file tier", r->write ? "write" : "read", r->block,
           (unsigned long long)offset_of(s, r->block), name, why);
}

/* ---- the end of a request */

/* Notes the outcome in the block's record, then calls done. outstanding is decremented only after done has returned:
 * gmi_store_close() waits for it, and the store's records must outlive everything that done calls. The request may be
 * gone once done has been called, so the store's address is kept. */
static void finish(gmi_block_request_t *r) {
  gmi_store_t *s = r->store;
  if (r->private_flags & REQUEST_REFUSED) {
    r->io.status = r->refusal;
    r->io.native_code = 0;
  } else {
    if (r->io.status) {
      describe_failure(r);
    } else if (r->private_flags & REQUEST_COMPARED && r->checksum != r->expected) {
      r->io.status = GEMINI_ERR_FORMAT;
      describe_damage(r);
    }
    pthread_mutex_lock(&s->lock);
    gmi_block_t *b = &s->blocks[r->block];
    if (!r->write) {
      b->readers--;
    } else {
      b->flags &= (uint16_t)~BLOCK_WRITING;
      if (r->io.status) b->flags |= BLOCK_FAILED;
      else b->flags |= BLOCK_READABLE | (s->keep ? BLOCK_DIRTY : 0);
      if (!r->io.status && r->private_flags & REQUEST_SUMMED) {
        b->flags |= BLOCK_SUMMED;
        b->checksum = r->checksum;
      }
    }
    gmi_block_settle(s, r->block);
    pthread_mutex_unlock(&s->lock);
  }
  r->done(r);
  pthread_mutex_lock(&s->lock);
  if (!--s->outstanding) pthread_cond_broadcast(&s->idle);
  pthread_mutex_unlock(&s->lock);
}

/* Called once by the transfer and once by the sum, or once in all where one follows the other; the last call ends the
 * request. The decrements synchronise with each other (the default order includes acquire and release), so that the
 * thread that finishes sees what the other half wrote to the request. */
static void half_done(gmi_block_request_t *r) {
  if (atomic_fetch_sub(&r->halves, 1) == 1) finish(r);
}

/* ---- sums */

/* Sums the next most_bytes of a request's block. One thread at a time works on a request: the one that took it off the
 * queue. */
static void sum(gmi_block_request_t *r, uint64_t most_bytes) {
  uint64_t left = r->moved_bytes - r->summed_bytes, size = left < most_bytes ? left : most_bytes;
  r->checksum = gmi_crc32c(r->checksum, (const char *)r->buffer + r->summed_bytes, size);
  r->summed_bytes += size;
}

/* Inserts a request at the front or the end of its urgency's list. Called with the queue's lock held. */
static void queue(gmi_sums_t *q, gmi_block_request_t *r, bool in_front) {
  gmi_block_request_t **at = in_front ? &q->first[r->urgent] : q->end[r->urgent];
  r->next = *at;
  *at = r;
  if (!r->next) q->end[r->urgent] = &r->next;
}

static void queue_new(gmi_sums_t *q, gmi_block_request_t *r) {
  pthread_mutex_lock(&q->lock);
  queue(q, r, false);
  pthread_cond_signal(&q->more);
  pthread_mutex_unlock(&q->lock);
}

/* A summing thread. It sums a slice, then puts the request back in front of its list: so the block is continued next
 * unless an urgent one has arrived meanwhile. The threads end when stop is set and the queue is empty. */
static void *sum_blocks(void *user) {
  gmi_store_t *s = user;
  gmi_sums_t *q = &s->sums;
  pthread_mutex_lock(&q->lock);
  for (;;) {
    uint32_t urgent = q->first[1] != NULL;
    gmi_block_request_t *r = q->first[urgent];
    if (!r) {
      if (q->stop) break;
      pthread_cond_wait(&q->more, &q->lock);
      continue;
    }
    q->first[urgent] = r->next;
    if (!r->next) q->end[urgent] = &q->first[urgent];
    pthread_mutex_unlock(&q->lock);
    sum(r, SLICE_BYTES);
    bool over = r->summed_bytes == r->moved_bytes;
    if (over) half_done(r);
    pthread_mutex_lock(&q->lock);
    if (!over) queue(q, r, true);
  }
  pthread_mutex_unlock(&q->lock);
  return NULL;
}

gemini_status_t gmi_sums_open(gmi_store_t *store) {
  gmi_sums_t *q = &store->sums;
  pthread_mutex_init(&q->lock, NULL);
  pthread_cond_init(&q->more, NULL);
  for (int urgent = 0; urgent < 2; urgent++) q->end[urgent] = &q->first[urgent];
  if (!store->checksum || store->block_bytes <= SMALL_BYTES) return GEMINI_OK;
  /* One thread per file suffices: it sums faster than a drive transfers. Fewer threads than planned still work, so only
   * a failure to start the first one is an error. */
  uint32_t count = store->file_count < GMI_SUMMING_THREADS_LIMIT ? store->file_count : GMI_SUMMING_THREADS_LIMIT;
  for (; q->thread_count < count; q->thread_count++) {
    int error = gmi_thread_start(&q->threads[q->thread_count], sum_blocks, store);
    if (!error) continue;
    if (q->thread_count) break;
    gmi_sums_close(store);
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, error, "file tier: could not start a thread: %s", strerror(error));
  }
  return GEMINI_OK;
}

void gmi_sums_close(gmi_store_t *store) {
  gmi_sums_t *q = &store->sums;
  pthread_mutex_lock(&q->lock);
  q->stop = true;
  pthread_cond_broadcast(&q->more);
  pthread_mutex_unlock(&q->lock);
  for (uint32_t i = 0; i < q->thread_count; i++) pthread_join(q->threads[i], NULL);
  pthread_cond_destroy(&q->more);
  pthread_mutex_destroy(&q->lock);
}

/* ---- the beginning of a request */

/* done of the engine's request. A failed transfer is not summed: its bytes are of no use. A write that is summed beside
 * its transfer already has its sum under way. */
static void transferred(gmi_request_t *io) {
  gmi_block_request_t *r = (gmi_block_request_t *)io; /* its first member */
  gmi_store_t *s = r->store;
  bool side_by_side = s->sums.thread_count && r->write;
  if (!r->io.status && !side_by_side && r->private_flags & (REQUEST_SUMMED | REQUEST_COMPARED)) {
    if (s->sums.thread_count) {
      queue_new(&s->sums, r);
      return;
    }
    sum(r, UINT64_MAX);
  }
  half_done(r);
}

static gemini_status_t refuse(gmi_block_request_t *r, gemini_status_t status, const char *why) {
  snprintf(r->message, sizeof r->message, "%.112s: could not %s block %u: %s", r->owner ? r->owner : "file tier",
           r->write ? "write" : "read", r->block, why);
  return status;
}

/* May the request begin? Called with the store's lock held, as is begin(), in one critical section: between the two no
 * other request can change the block. */
static gemini_status_t check(const gmi_store_t *s, gmi_block_request_t *r) {
  if (r->block >= s->block_count) return refuse(r, GEMINI_ERR_INVALID, "there is no such block");
  const gmi_block_t *b = &s->blocks[r->block];
  const gmi_blockfile_t *file = &s->stripes[r->block % s->file_count].file;
  if (!r->buffer || (file->direct && (uintptr_t)r->buffer % file->alignment_bytes))
    return refuse(r, GEMINI_ERR_INVALID, "the buffer is NULL or not aligned");
  if (r->size_bytes > s->block_bytes || r->size_bytes % 4096)
    return refuse(r, GEMINI_ERR_INVALID, "its size is larger than the block, or no multiple of 4096");
  if (!(b->flags & BLOCK_TAKEN)) return refuse(r, GEMINI_ERR_STATE, "it was not taken");
  if (b->flags & BLOCK_WRITING) return refuse(r, GEMINI_ERR_BUSY, "it is being written");
  if (r->write) {
    if (b->flags & (BLOCK_COMMITTED | BLOCK_PENDING)) return refuse(r, GEMINI_ERR_STATE, "it belongs to a checkpoint");
    if (b->readers) return refuse(r, GEMINI_ERR_BUSY, "it is being read");
  } else {
    if (b->flags & BLOCK_FAILED) return refuse(r, GEMINI_ERR_IO, "the last write to it failed");
    if (!(b->flags & BLOCK_READABLE)) return refuse(r, GEMINI_ERR_STATE, "it was never written");
    if (b->readers == UINT16_MAX) return refuse(r, GEMINI_ERR_BUSY, "it is being read by too many");
  }
  return GEMINI_OK;
}

/* Changes the block's record to "being written" or "one more reader". A write starts a new generation at once: from
 * here on the old bytes count as lost, whether or not the write succeeds. Generation and checksums are copied into the
 * request, so that comparing them later needs no lock. */
static void begin(gmi_store_t *s, gmi_block_request_t *r) {
  gmi_block_t *b = &s->blocks[r->block];
  if (r->write) {
    uint16_t known = b->flags & BLOCK_SUMMED ? BLOCK_PREVIOUS : 0;
    b->previous = b->checksum;
    b->generation++;
    b->flags &= BLOCK_TAKEN | BLOCK_USED;
    b->flags |= BLOCK_WRITING | known;
    if (s->checksum) r->private_flags |= REQUEST_SUMMED;
  } else {
    b->readers++;
    r->expected = b->checksum;
    r->previous = b->previous;
    if (s->checksum && b->flags & BLOCK_SUMMED) r->private_flags |= REQUEST_COMPARED;
    if (b->flags & BLOCK_PREVIOUS) r->private_flags |= REQUEST_PREVIOUS;
  }
  r->generation = b->generation;
}

void gmi_store_submit(gmi_store_t *store, gmi_block_request_t *request) {
  gmi_store_t *s = store;
  gmi_block_request_t *r = request;
  r->store = s;
  r->message[0] = 0;
  r->private_flags = 0;
  r->moved_bytes = r->size_bytes ? r->size_bytes : s->block_bytes;
  r->summed_bytes = 0;
  r->next = NULL;
  pthread_mutex_lock(&s->lock);
  s->outstanding++;
  r->refusal = check(s, r);
  if (!r->refusal) begin(s, r);
  pthread_mutex_unlock(&s->lock);

  uint32_t file = r->block % s->file_count;
  r->io = (gmi_request_t){ .buffer = r->buffer,
                           .size_bytes = r->moved_bytes,
                           .offset_bytes = offset_of(s, r->block),
                           .file = s->stripes[file].engine_file,
                           .write = r->write,
                           .urgent = r->urgent,
                           .done = transferred };
  if (r->refusal) {
    r->private_flags |= REQUEST_REFUSED;
    /* The engine refuses size 0 and calls done on its own thread: a refused request ends like any other, and never
     * within the caller's submit. */
    r->io.size_bytes = 0;
  }
  bool side_by_side = s->sums.thread_count && r->private_flags & REQUEST_SUMMED;
  /* Set before either half can start: queue_new() and gmi_engine_submit() publish it with the locks that they take. */
  atomic_init(&r->halves, side_by_side ? 2 : 1);
  if (r->private_flags & (REQUEST_SUMMED | REQUEST_COMPARED)) r->checksum = gmi_crc32c_generation(r->generation);
  if (side_by_side) queue_new(&s->sums, r);
  gmi_engine_submit(s->engine, (gmi_request_t *[]){ &r->io }, 1);
}

/* For gmi_store_wait(); lives on the waiting thread's stack. wake() signals with the lock held, so that the waiter
 * cannot destroy the lock before wake() has left it. */
typedef struct waiter {
  pthread_mutex_t lock;
  pthread_cond_t over;
  bool is_over;
} waiter_t;

static void wake(gmi_block_request_t *r) {
  waiter_t *c = r->user;
  pthread_mutex_lock(&c->lock);
  c->is_over = true;
  pthread_cond_signal(&c->over);
  pthread_mutex_unlock(&c->lock);
}

gemini_status_t gmi_store_wait(gmi_store_t *store, gmi_block_request_t *request) {
  waiter_t c = { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false };
  request->done = wake;
  request->user = &c;
  gmi_store_submit(store, request);
  pthread_mutex_lock(&c.lock);
  while (!c.is_over) pthread_cond_wait(&c.over, &c.lock);
  pthread_mutex_unlock(&c.lock);
  pthread_cond_destroy(&c.over);
  pthread_mutex_destroy(&c.lock);
  if (!request->io.status) return GEMINI_OK;
  return gmi_fail(request->io.status, request->io.native_code, "%s", request->message);
}

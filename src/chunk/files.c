/* The file tier: asynchronous transfers between host slots and the blocks of the store.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A transfer counts as work on its slot, like an update: queued copies, updates and callers that need the slot's bytes
 * wait for the slot's count. A transfer's effect on the chunk's record is applied later, under the manager's lock, by
 * the next call that reaps finished transfers (gmi_files_poll, gmi_files_reap). Until then the chunk's record names the
 * transfer, the chunk keeps its slot, and the block it is read from is not reused: if the read fails, the bytes are
 * still in the file.
 *
 * Threads: any thread that holds the manager's lock; finished() alone runs on a thread of the I/O engine, without
 * it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chunk/arena.h"
#include "chunk/cut.h"
#include "chunk/files.h"
#include "chunk/host.h"
#include "chunk/residency.h"
#include "core/manager.h"
#include "core/workers.h"
#include "io/borrowed.h"
#include "io/store.h"

/* A transfer. Created by transfer(), freed by reap_one(); a failed read stays in the chunk's record until a caller has
 * got its error or the chunk has been read again. */
struct gmi_io {
  gmi_block_request_t request;
  gmi_manager_t *m;
  gmi_chunk_t *chunk;
  gmi_slot_t *slot;
  gmi_io_t *next; /* in gmi_manager_t.io.finished */
  uint64_t begin_ns, end_ns;
  uint64_t work; /* the slot's work_done once the transfer is over */
  uint32_t block;
  bool superseded; /* the chunk has got other bytes: success or failure of this transfer no longer matters to it */
  bool rewritten;  /* the record has given up the block: a write's bytes are outdated, a read's are about to change */
  char owner[112];
};

const struct gmi_sys *gmi_files_sys;

static uint32_t budget_blocks(const gmi_manager_t *m, uint64_t bytes) {
  uint64_t count = bytes / gmi_block_bytes(m);
  return count < GMI_BLOCK_BORROWED ? (uint32_t)count : GMI_BLOCK_BORROWED - 1;
}

uint32_t gmi_files_engine_wanted(const gmi_manager_t *m) {
#ifdef __SANITIZE_THREAD__ /* it cannot see what the kernel does for io_uring, and would report false races */
  if (m->config.file_engine == GMI_ENGINE_AUTO) return GMI_ENGINE_THREADS;
#endif
  return m->config.file_engine;
}

/* ---- open and close */
static gemini_status_t store_open(gmi_manager_t *m, uint64_t block_bytes) {
  gmi_store_config_t config = { .directories = m->file.dir,
                                .block_bytes = block_bytes,
                                .block_count = (uint32_t)(m->config.file_bytes / block_bytes),
                                .engine_kind = gmi_files_engine_wanted(m),
                                .checksum = true,
                                .keep = m->file.checkpoint_name != NULL,
                                .checkpoint_name = m->file.checkpoint_name,
                                .sys = m->file.sys };
  gemini_status_t status = gmi_store_open(&config, &m->file.store);
  if (status) m->file.store = NULL;
  m->file.opened_bytes = block_bytes;
  return status;
}

gemini_status_t gmi_files_open(gmi_manager_t *m) {
  if (!m->config.file_bytes) return GEMINI_OK;
  /* Reserve the space now, so that a missing or full directory fails the open. The chunk size may not be known yet: the
   * smallest one stands in, and gmi_files_cut() opens the store again with the right size. */
  uint64_t block = gmi_sizes_of(m, gmi_chunk_min(m)).block_bytes;
  while (m->config.file_bytes / block >= GMI_BLOCK_BORROWED) block *= 2;
  return store_open(m, block);
}

gemini_status_t gmi_files_cut(gmi_manager_t *m, uint64_t block_bytes) {
  if (!m->file.dir) return GEMINI_OK;
  gemini_status_t status = GEMINI_OK;
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_SPACE, 0);
  if (!m->file.store || m->file.opened_bytes != block_bytes) {
    gmi_store_close(m->file.store);
    m->file.store = NULL;
    status = store_open(m, block_bytes);
  }
  for (uint64_t part = 0; !status && part < m->host.part_count; part++)
    if (m->host.committed[part])
      gmi_files_buffer(m, m->host.base + part * m->host.part_bytes, m->host.committed[part], true);
  gmi_wait_end(m, &wait);
  if (!status) {
    gmi_store_figures_t figures;
    gmi_store_figures(m->file.store, &figures);
    gmi_log(m, GEMINI_LOG_INFO, "files in %s: %s%s%s", m->file.dir, figures.engine.features, *figures.note ? "; " : "",
            figures.note);
  }
  return status;
}

uint32_t gmi_files_engine(gmi_manager_t *m) {
  gmi_store_figures_t figures;
  if (!m->file.store) return GEMINI_FILE_ENGINE_AUTO;
  gmi_store_figures(m->file.store, &figures);
  return figures.engine.kind;
}

void gmi_files_buffer(gmi_manager_t *m, void *base, uint64_t size, bool add) {
  if (m->file.store && add) (void)gmi_store_buffer_add(m->file.store, base, size); /* refused: slower, but works */
  if (m->file.store && !add) gmi_store_buffer_remove(m->file.store, base, size);
}

void gmi_files_close(gmi_manager_t *m) {
  gmi_store_close(m->file.store);
  m->file.store = NULL;
  gmi_borrowed_close(m->file.borrowed);
  m->file.borrowed = NULL;
  for (gmi_io_t *io = atomic_exchange(&m->io.finished, NULL), *next; io; io = next) {
    next = io->next;
    free(io);
  }
}

/* ---- transfers */
/* Called on a thread of the I/O engine, without the manager's lock. Publishes the transfer first and advances the
 * slot's count second, so a thread that sees the count finds the transfer in the list. The push (release, by the
 * compare-and-swap) pairs with the exchange in gmi_files_poll(), which takes the whole list, so there is no ABA
 * problem. */
static void finished(gmi_block_request_t *request) {
  gmi_io_t *io = request->user;
  gmi_manager_t *m = io->m;
  gmi_slot_t *slot = io->slot;
  gemini_status_t status = request->write ? GEMINI_OK : request->io.status; /* a failed write leaves the slot intact */
  char message[sizeof request->message];
  memcpy(message, request->message, sizeof message);
  io->end_ns = m->device.ops->now(m->device.self);
  gmi_io_t *head = atomic_load(&m->io.finished);
  do io->next = head;
  while (!atomic_compare_exchange_weak(&m->io.finished, &head, io));
  /* Once the count has advanced, reap_one() may free io and request: only the copies above are used from here on. */
  gmi_workers_work_done(m, slot, status, message);
}

/* Starts a transfer on a quiet slot. Waits here for copies between slot and device rather than in the engine, because a
 * copy takes a fraction of the time of the transfer. */
static gemini_status_t transfer(gmi_manager_t *m, gmi_chunk_t *c, uint32_t block, bool write, uint32_t reason) {
  gmi_slot_t *slot = &m->host.slots[gmi_chunk_slot(c)];
  gmi_file_forgive(c); /* the error of an earlier failed read: this transfer replaces that attempt */
  gemini_status_t status = gmi_chunk_settle_host(m, c);
  if (status) return status;
  gmi_borrowed_read_t *reading = NULL;
  if (gmi_block_is_borrowed(block)) status = gmi_borrowed_read_new(m->file.borrowed, block, &reading);
  gmi_io_t *io = status ? NULL : calloc(1, sizeof *io);
  if (!io) {
    free(reading);
    return status ? status : gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a transfer's record");
  }
  snprintf(io->owner, sizeof io->owner, "chunk %u of arena %s", c->index, gmi_chunk_arena(m, c)->name);
  io->m = m;
  io->chunk = c;
  io->slot = slot;
  io->block = block;
  io->begin_ns = m->device.ops->now(m->device.self);
  io->request.block = block;
  io->request.write = write;
  io->request.urgent = !write; /* a read has queue depth reserved: something waits for its bytes */
  io->request.buffer = gmi_chunk_host(m, c);
  io->request.size_bytes = gmi_copy_bytes(m, GEMINI_TIER_HOST, GEMINI_TIER_FILE);
  io->request.owner = io->owner;
  io->request.done = finished;
  io->request.user = io;
  gmi_chunk_io_set(m, c, io);
  m->io.count++;
  m->io.writes += write;
  io->work = ++slot->work_queued;
  slot->failure = GEMINI_OK;
  gmi_link_moved(m, gmi_link_file(m, write), reason, 1);
  if (reading) gmi_borrowed_submit(m->file.borrowed, reading, &io->request);
  else gmi_store_submit(m->file.store, &io->request);
  return GEMINI_OK;
}

/* Measures the time per chunk: since the transfer before it ended, or since its own begin if that is later, as several
 * are in flight at once. Transfers end in bunches, so the mean runs over many (4096). */
static void measure(gmi_manager_t *m, const gmi_io_t *io) {
  gmi_link_t *link = gmi_link_file(m, io->request.write);
  gmi_rate_t *rate = &link->chunk_ns;
  uint64_t from = io->begin_ns > m->io.last_ns ? io->begin_ns : m->io.last_ns;
  if (io->end_ns > from) m->trace.observer->chunk_transferred(m, io->chunk, io->request.write, from, io->end_ns);
  double ns = io->end_ns > from ? (double)(io->end_ns - from) : 0;
  rate->samples++;
  rate->mean += (ns - rate->mean) / (double)(rate->samples < 4096 ? rate->samples : 4096);
  gmi_link_measured(m, link);
  if (io->end_ns > m->io.last_ns) m->io.last_ns = io->end_ns;
}

static void give_block(gmi_manager_t *m, uint32_t block) {
  GMI_ASSERT(gmi_lock_is_mine(m));
  if (gmi_block_is_borrowed(block)) {
    gmi_borrowed_give(m->file.borrowed, block);
    return;
  }
  GMI_ASSERT(m->file.used >= gmi_block_bytes(m));
  gmi_store_give(m->file.store, block);
  m->file.used -= gmi_block_bytes(m);
}

void gmi_file_forgive(gmi_chunk_t *c) { free(gmi_chunk_failed_read_take(c)); }

/* Applies a finished transfer to its chunk's record, and returns its status. The cases:
 *   write, succeeded and still the chunk's bytes: the block becomes a valid copy; else it is given back.
 *   read, superseded: only a block that the record has given up is given back.
 *   read, failed: the host copy is not valid; a block that was given up becomes the chunk's again, because the update
 *     that was to change the bytes does not run on them. The error is kept for the next caller that needs the chunk.
 *   read, succeeded: a block that the record has given up is given back. */
static gemini_status_t reap_one(gmi_manager_t *m, gmi_io_t *io) {
  gmi_chunk_t *c = io->chunk;
  gemini_status_t status = io->request.io.status;
  gmi_workers_wait_slot(m, io->slot, io->work); /* finished() still uses slot and manager until it advances the count */
  gmi_chunk_io_set(m, c, NULL);
  m->io.count--;
  m->io.writes -= io->request.write;
  if (!status) measure(m, io);
  bool keep = false;
  if (io->request.write) {
    if (status || io->rewritten) give_block(m, io->block);
    else gmi_chunk_block_valid(m, c, io->block);
  } else if (io->superseded) {
    if (io->rewritten) give_block(m, io->block);
  } else if (status) {
    gmi_chunk_read_failed(m, c, io, io->rewritten ? io->block : GMI_NONE);
    keep = true;
  } else if (io->rewritten) {
    give_block(m, io->block);
  }
  if (status) gmi_fail(status, io->request.io.native_code, "%s", io->request.message);
  if (!keep) free(io);
  return status;
}

void gmi_files_poll(gmi_manager_t *m) {
  /* Relaxed: a hint that skips the exchange. A transfer missed here is found by the next poll; a thread that has waited
   * for the slot's count does find it, as the push comes before the count. */
  if (!atomic_load_explicit(&m->io.finished, memory_order_relaxed)) return;
  gmi_io_t *list = atomic_exchange(&m->io.finished, NULL), *next;
  for (gmi_io_t *io = list; io; io = next) {
    next = io->next;
    bool write = io->request.write;
    int native_code = io->request.io.native_code;
    gemini_status_t status = reap_one(m, io);
    if (!status || !write) continue;
    m->io.failure = status; /* of a write: reported by the next gmi_files_reap(m, NULL), from a call that needs room */
    m->io.native_code = native_code;
    snprintf(m->io.message, sizeof m->io.message, "%s", gmi_fail_message());
  }
}

gemini_status_t gmi_files_reap(gmi_manager_t *m, gmi_chunk_t *of) {
  gmi_files_poll(m);
  gemini_status_t status = GEMINI_OK; /* each failure is reported once, and then forgotten */
  if (of && gmi_chunk_failed_read(of)) {
    const gmi_block_request_t *request = &gmi_chunk_failed_read(of)->request;
    status = gmi_fail(request->io.status, request->io.native_code, "%s", request->message);
    gmi_file_forgive(of);
  } else if (!of && m->io.failure) {
    status = gmi_fail(m->io.failure, m->io.native_code, "%s", m->io.message);
    m->io.failure = GEMINI_OK;
  }
  return status;
}

void gmi_file_supersede(gmi_chunk_t *c) {
  if (gmi_chunk_io(c)) gmi_chunk_io(c)->superseded = true;
  gmi_file_forgive(c);
}

/* ---- blocks */
void gmi_file_drop_block(gmi_manager_t *m, gmi_chunk_t *c, uint32_t block) {
  gmi_io_t *io = gmi_chunk_io(c);
  if (io) io->rewritten = true;
  if (io && !io->request.write) return; /* reap_one() gives it back, or to the chunk if the read fails */
  if (block != GMI_NONE) give_block(m, block);
}
void gmi_file_drop(gmi_manager_t *m, gmi_chunk_t *c) { gmi_file_drop_block(m, c, gmi_chunk_block_lost(m, c)); }

/* Gives back blocks whose bytes are valid in another tier, until at most `bytes` are in use or none is left. Borrowed
 * ones take no space. */
void gmi_files_shrink(gmi_manager_t *m, uint64_t bytes) {
  gmi_files_poll(m);
  for (uint32_t i = 0; i < GMI_ARENAS && m->file.used > bytes; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    for (uint32_t k = 0; a && a->chunks && k < atomic_load(&a->chunk_count) && m->file.used > bytes; k++) {
      gmi_chunk_t *c = &a->chunks[k];
      if (gmi_chunk_block(c) == GMI_NONE || gmi_chunk_has_only(c, GMI_VALID_FILE)) continue;
      if (gmi_block_is_borrowed(gmi_chunk_block(c))) continue;
      if (gmi_chunk_io(c)) { /* it is being read: wait until the bytes have come, then look again */
        gmi_workers_wait_slot(m, gmi_chunk_io(c)->slot, gmi_chunk_io(c)->slot->work_queued);
        gmi_files_poll(m);
        if (gmi_chunk_block(c) == GMI_NONE || gmi_chunk_has_only(c, GMI_VALID_FILE)) continue;
      }
      gmi_file_drop(m, c);
    }
  }
}

gemini_status_t gmi_files_resize(gmi_manager_t *m, uint64_t bytes) {
  if (!m->file.store)
    return bytes ? gmi_fail(GEMINI_ERR_STATE, 0, "the manager was opened without a file tier") : GEMINI_OK;
  gmi_files_shrink(m, bytes);
  if (bytes < m->file.used)
    return gmi_fail(GEMINI_ERR_OOM_FILE, 0, "%llu bytes are in files, more than the new budget, %llu",
                    (unsigned long long)m->file.used, (unsigned long long)bytes);
  if (!atomic_load(&m->cut.chunk_bytes)) return GEMINI_OK;
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_SPACE, 0);
  gemini_status_t status = gmi_store_resize(m->file.store, budget_blocks(m, bytes));
  gmi_wait_end(m, &wait);
  return status;
}

/* Takes a block of the budget, at the expense of blocks that only duplicate another tier's bytes if needed; those of a
 * checkpoint that is being written stay. */
static gemini_status_t block_take(gmi_manager_t *m, uint32_t *block_out) {
  uint64_t block_bytes = gmi_block_bytes(m);
  if (!m->file.store) return gmi_fail(GEMINI_ERR_OOM_FILE, 0, "a chunk must go to a file, but file_bytes is 0");
  if (m->config.file_bytes < m->file.used + block_bytes && m->config.file_bytes >= block_bytes &&
      !m->file.checkpointing)
    gmi_files_shrink(m, m->config.file_bytes - block_bytes);
  if (m->config.file_bytes < m->file.used + block_bytes)
    return gmi_fail(
        GEMINI_ERR_OOM_FILE, 0, "a block of %llu bytes does not fit in files: %llu of the budget %llu are in use",
        (unsigned long long)block_bytes, (unsigned long long)m->file.used, (unsigned long long)m->config.file_bytes);
  gemini_status_t status = gmi_store_take(m->file.store, block_out);
  if (status) return status;
  m->file.used += block_bytes;
  if (m->file.used > m->stats.peak_bytes[GEMINI_TIER_FILE]) m->stats.peak_bytes[GEMINI_TIER_FILE] = m->file.used;
  return GEMINI_OK;
}

gemini_status_t gmi_file_write(gmi_manager_t *m, gmi_chunk_t *c, uint32_t reason) {
  uint32_t block;
  gemini_status_t status = block_take(m, &block);
  if (status) return status;
  status = transfer(m, c, block, true, reason);
  if (status) give_block(m, block);
  return status;
}

gemini_status_t gmi_file_read(gmi_manager_t *m, gmi_chunk_t *c, uint32_t reason) {
  gemini_status_t status = transfer(m, c, gmi_chunk_block(c), false, reason);
  if (!status) gmi_chunk_host_valid(m, c); /* behind the slot's count; reap_one() takes it back if the read fails */
  return status;
}

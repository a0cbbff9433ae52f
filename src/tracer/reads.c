/* Reads from files, ahead of the fetches of a plan that only reads, as of a model's weights.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Where the host has no room for all that the plan fetches, some chunks stay there and the others pass through: each
 * pass reads them again. Which ones is free to choose, as all are wanted once in a pass. To give up the slot whose next
 * use is the latest would do, but leaves those of one stretch of the pass, which then waits for the disk, while the
 * disk rests during the others. So those that pass are spread over it: chunk i is one of them if the fraction of i
 * times the golden ratio is below their share. These fractions are spread evenly at every share (three-distance
 * theorem; Knuth, The Art of Computer Programming 3, 6.4), and a share that grows keeps those of before, so that plans
 * of several kinds of passes differ in few of them.
 *
 * Places in the sequence of fetches are counted on over passes: place p is fetch p % total. */
#include <stdlib.h>

#include "chunk/host.h"
#include "tracer/variants.h"

#define GOLDEN_RATIO UINT64_C(0x9E3779B97F4A7C15) /* its fraction, of 2^64 */
/* Reads ahead at a time: the disk always has several to do. In few of the slots, as each that is filled ahead of its
 * use holds nothing else meanwhile: one in so many. */
enum { READS_AHEAD = 32, READS_SHARE = 8 };
/* Slots that copies to the device hold meanwhile are found out, in passes from so many on. */
enum { SETTLED_PASSES = 2 };

static uint32_t most_ahead(const gmi_manager_t *m) {
  const uint32_t share = m->host.slot_count / READS_SHARE;
  return share < READS_AHEAD ? share : READS_AHEAD;
}

static bool passes(const gmi_reads_t *r, uint32_t chunk) {
  return r->share && r->fetched[chunk] && chunk * GOLDEN_RATIO < r->share;
}

/* Finds which chunks the plan fetches. False: no memory. */
static bool find_fetched(gmi_plan_bundle_t *b) {
  if (b->reads.fetched) return true;
  b->reads.fetched = calloc((size_t)b->input.chunk_count + 1, sizeof *b->reads.fetched);
  if (!b->reads.fetched) return false;
  for (uint32_t k = 0; k < b->plan.fetch_first[b->input.op_count]; k++)
    b->reads.fetched[b->plan.fetches[k].chunk] = true;
  return true;
}

void gmi_tracer_reads_begin(gmi_manager_t *m, variant_t *v, bool goes_on) {
  gmi_plan_bundle_t *b = &v->bundle;
  gmi_reads_t *r = &b->reads;
  if (!goes_on) r->at = r->read = r->left = r->waiting = r->passes = 0;
  else if (!r->share && !r->missed) return; /* all was there in the pass before */
  /* The first passes under a share still find the slots as others left them. */
  if (r->lacked && r->share && r->passes++ >= SETTLED_PASSES) r->copied += most_ahead(m);
  const uint64_t share = r->share;
  r->share = 0;
  r->missed = r->lacked = false;
  /* With a store, what else is on the host may be written there as slots are reclaimed, which makes more room than a
   * share would be reckoned from: evaluations beside training find the states gone. */
  if (!m->file.borrowed || m->file.store || !v->reads_only || b->input.groups.group_count || !find_fetched(b)) return;
  uint32_t wanted = 0, movable = 0, kept = 0;
  uint32_t slots = 0; /* that wanted chunks have, or others that can leave theirs */
  for (uint32_t i = 0; i < b->input.chunk_count; i++) {
    const gmi_chunk_t *c = b->chunk_of[i];
    const bool in_file = gmi_chunk_has(c, GMI_VALID_FILE), stays = gmi_chunk_is_resident(c) && !r->fetched[i];
    wanted += r->fetched[i];
    movable += r->fetched[i] && in_file;
    kept += stays;
    slots += gmi_chunk_has_slot(c) && (r->fetched[i] || (in_file && stays));
  }
  /* Copies may be queued for all frames in which chunks come and go: at most so many have slots until they end. */
  const uint32_t queued = m->frames.count > kept ? m->frames.count - kept : 0;
  if (r->copied > queued) r->copied = queued;
  const uint32_t others = m->host.slot_count - gmi_host_free(m) - slots, taken = others + most_ahead(m) + r->copied;
  if (wanted + others <= m->host.slot_count || !movable) return;
  const uint32_t room = m->host.slot_count > taken ? m->host.slot_count - taken : 0;
  r->share = wanted - room < movable ? UINT64_MAX / movable * (wanted - room) : UINT64_MAX;
  if (r->share != share) r->read = r->at, r->waiting = 0; /* others pass now: looks at those ahead again */
  /* What the plan keeps on the device is not wanted on the host. */
  for (uint32_t i = 0; i < b->input.chunk_count; i++)
    if (!r->fetched[i] && gmi_chunk_is_resident(b->chunk_of[i])) gmi_host_file_drop(m, b->chunk_of[i]);
}

/* Frees the slots of passing chunks that have been fetched, as soon as they have been copied. */
static void leave_behind(gmi_manager_t *m, gmi_plan_bundle_t *b) {
  const uint32_t total = b->plan.fetch_first[b->input.op_count];
  for (gmi_reads_t *r = &b->reads; r->left < r->at; r->left++) {
    const uint32_t i = b->plan.fetches[r->left % total].chunk;
    if (!passes(r, i)) continue;
    gmi_chunk_t *c = b->chunk_of[i];
    const bool wanted = !gmi_chunk_is_resident(c) && gmi_tracer_next_use(m, c) >> 32 <= m->trace.tracer->iteration;
    if (!wanted && !gmi_host_file_drop(m, c)) return;
  }
}

/* Starts to read the chunk of a place, if it is only in a file. False: it cannot be read now. */
static bool read_soon(gmi_manager_t *m, variant_t *v, uint64_t place) {
  const gmi_plan_t *plan = &v->bundle.plan;
  const gmi_plan_move_t *move = &plan->fetches[place % plan->fetch_first[v->bundle.input.op_count]];
  gmi_chunk_t *c = v->bundle.chunk_of[move->chunk];
  if (move->piece != GMI_NO_PIECE || gmi_tracer_comes_later(m, c)) return true;
  v->bundle.reads.missed |= !gmi_chunk_has(c, GMI_VALID_DEVICE | GMI_VALID_HOST | GMI_VALID_ZERO);
  return gmi_chunk_read_soon(m, c, GEMINI_REASON_PLAN);
}

void gmi_tracer_reads_op(gmi_manager_t *m, variant_t *v) {
  const gmi_plan_t *plan = &v->bundle.plan;
  gmi_reads_t *r = &v->bundle.reads;
  const uint32_t total = plan->fetch_first[v->bundle.input.op_count], most = most_ahead(m);
  if ((!m->file.store && !m->file.borrowed) || !total) return;
  const uint32_t next = m->trace.tracer->now.due.next[1] % total;
  for (const uint64_t to = r->at + (next + total - r->at % total) % total; r->at < to; r->at++) {
    if (r->at >= r->read || !passes(r, plan->fetches[r->at % total].chunk)) continue;
    GMI_ASSERT(r->waiting > 0);
    r->waiting--;
  }
  if (r->read < r->at) r->read = r->at;
  leave_behind(m, &v->bundle);
  /* Whatever comes next, then those that pass. */
  for (uint32_t k = 0; k < most && k < total; k++)
    if (!read_soon(m, v, next + k)) return;
  for (; r->share && r->waiting < most && r->read < r->at + total; r->read++) {
    if (!passes(r, plan->fetches[r->read % total].chunk)) continue;
    if (!read_soon(m, v, r->read)) {
      r->lacked |= r->waiting < most / 2;
      return;
    }
    r->waiting++;
  }
}

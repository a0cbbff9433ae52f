/* Translates a recorded iteration into the policy's terms (chunks, frames, pieces, nanoseconds) and makes its plan.
 * Called by follow.c and tracer.c.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Chunks of all storing arenas are numbered consecutively: arena i's first chunk is builder_t.base[i]. Uses become
 * accesses, updates become pieces, cut exactly as chunk/update.c cuts them. Rates become times per chunk and per
 * piece. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "chunk/arena.h"
#include "chunk/cut.h"
#include "chunk/host.h"
#include "chunk/residency.h"
#include "chunk/shard.h"
#include "chunk/update.h"
#include "core/workers.h"
#include "tracer/tracer.h"
#include "tracer/variants.h"

static int by_chunk(const void *a, const void *b) {
  uint32_t x = ((const gmi_plan_access_t *)a)->chunk, y = ((const gmi_plan_access_t *)b)->chunk;
  return x < y ? -1 : x > y;
}

/* Scratch state of gmi_plan_bundle_make(). The arrays are handed to the bundle. build_accesses() and build_pieces()
 * run twice: the first pass counts, the arrays are allocated, the second pass fills them. */
typedef struct {
  gmi_manager_t *m;
  const gmi_trace_t *trace;
  gmi_sizes_t sizes;          /* of the chunks that the plan is for; may differ from the manager's */
  uint32_t shift;             /* log2 of sizes.chunk_bytes */
  uint32_t base[GMI_ARENAS];  /* number of the first chunk of each storing arena */
  uint32_t count[GMI_ARENAS]; /* number of chunks of each */
  gmi_plan_op_t *ops;
  gmi_plan_access_t *accesses;
  uint64_t access_count;
  gmi_plan_piece_t *pieces;
  uint32_t piece_count;
  uint32_t *piece_chunks;
  uint64_t piece_chunk_count;
  uint8_t *kind, *pinned, *has_slot;
  uint32_t group_of[GMI_GROUPS], plan_group[GMI_GROUPS]; /* the manager's group of the plan's, and the other way */
  gmi_plan_collective_t *gathers, *sums;
  gmi_plan_group_t *links;
} builder_t;

/* Chunks of a byte range of a storing arena; false: the range is empty or exceeds the arena. */
static bool chunk_range(builder_t *b, uint32_t store, uint64_t offset, uint64_t size, uint32_t *first, uint32_t *last) {
  if (!size || (offset + size - 1) >> b->shift >= b->count[store]) return false;
  *first = (uint32_t)(offset >> b->shift);
  *last = (uint32_t)((offset + size - 1) >> b->shift);
  return true;
}

/* Chunks with which a plan may fill the host and files together: callers acquire tensors on the host, whole. */
static uint32_t home_slots_to_fill(gmi_manager_t *m) {
  uint64_t longest = 0;
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    const gmi_arena_t *a = gmi_arena_at(m, i);
    if (a && gmi_arena_has_tiers(a) && a->longest > longest) longest = a->longest;
  }
  const uint64_t slots = gmi_home_slots(m), spare = longest / gmi_chunk_bytes(m) + 2;
  return slots > spare ? (uint32_t)(slots - spare) : 1;
}

/* Chunks of the longest piece of the trace's updates. */
static uint64_t longest_piece(gmi_manager_t *m, const gmi_trace_t *trace) {
  uint64_t largest = 0;
  for (uint32_t u = 0; u < trace->update_count; u++) {
    const gmi_trace_update_t *update = &trace->updates[u];
    const uint64_t unit = gmi_piece_elements(m, update->arenas, update->arena_count, gmi_chunk_bytes(m));
    uint64_t piece = 0; /* that does not begin with a chunk */
    for (uint32_t k = 0; k < update->arena_count; k++)
      piece += (unit * gmi_arena_at(m, update->arenas[k])->element_bytes >> m->cut.chunk_shift) + 1;
    if (piece > largest) largest = piece;
  }
  return largest;
}

uint64_t gmi_trace_home_frames(gmi_manager_t *m, const gmi_trace_t *trace) {
  if (!gmi_home_is_short(m)) return 0;
  uint64_t chunks = 0, largest = longest_piece(m, trace);
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    const gmi_arena_t *a = gmi_arena_at(m, i);
    if (a && gmi_arena_has_tiers(a)) chunks += (atomic_load(&a->size) + gmi_chunk_bytes(m) - 1) >> m->cut.chunk_shift;
  }
  /* An iteration with an update begins like one without, and may follow its gathers for a while. */
  for (uint32_t i = 0; i < GMI_VARIANTS; i++) {
    const uint64_t piece = longest_piece(m, &m->trace.tracer->variants[i].trace);
    if (piece > largest) largest = piece;
  }
  const uint64_t slots = home_slots_to_fill(m);
  /* States come to stay by pieces, and the chunks of one come while others have yet to leave, on the host and here. */
  return chunks + 3 * largest > slots ? chunks + 3 * largest - slots : 0;
}

uint32_t gmi_trace_other_chunks(const gmi_manager_t *m, const gmi_trace_t *trace, const gmi_trace_op_t *op) {
  uint32_t count = 0, arena = GMI_NONE;
  uint64_t next = 0; /* the first chunk of the arena that has not been counted */
  for (uint32_t i = op->use_first; i < op->use_first + op->use_count; i++) {
    const gmi_trace_use_t *use = &trace->uses[i];
    if (!use->size) continue;
    uint64_t first = use->offset >> m->cut.chunk_shift, end = ((use->offset + use->size - 1) >> m->cut.chunk_shift) + 1;
    if (use->arena != arena) next = 0;
    if (first < next) first = next;
    if (end > first) count += (uint32_t)(end - first);
    if (end > next) next = end;
    arena = use->arena;
  }
  return count;
}

static uint32_t frame_count(const builder_t *b) {
  return gmi_frames_of(b->m, b->sizes.frame_bytes) - b->m->graphs.frames;
}

/* Turns uses into accesses. fill false: only counts them, before merging. A write that covers a whole chunk is
 * FRESH. Accesses of the same chunk in one op are merged; the result is FRESH only if all of them are. */
static bool build_accesses(builder_t *b, bool fill) {
  uint64_t chunk_bytes = b->sizes.chunk_bytes, n = 0;
  for (uint32_t i = 0; i < b->trace->op_count; i++) {
    const gmi_trace_op_t *op = &b->trace->ops[i];
    uint64_t begin = n;
    uint32_t pages = gmi_trace_pages(op->heap_pages + op->gathered + b->trace->headroom, gmi_frame_bytes(b->m),
                                     b->sizes.frame_bytes);
    if (fill) b->ops[i] = (gmi_plan_op_t){ op->compute_ns, pages, (uint32_t)n };
    for (uint32_t s = op->use_first; s < op->use_first + op->use_count; s++) {
      const gmi_trace_use_t *use = &b->trace->uses[s];
      uint32_t first, last;
      if (!chunk_range(b, use->arena, use->offset, use->size, &first, &last)) return false;
      for (uint32_t c = first; c <= last; c++, n++) {
        if (!fill) continue;
        uint64_t from = (uint64_t)c * chunk_bytes, to = from + chunk_bytes;
        uint32_t mode = use->mode;
        if (mode == GMI_ACCESS_WRITE && use->offset <= from && use->offset + use->size >= to) mode |= GMI_ACCESS_FRESH;
        b->accesses[n] = (gmi_plan_access_t){ b->base[use->arena] + c, mode };
      }
    }
    if (!fill) continue;
    qsort(b->accesses + begin, n - begin, sizeof *b->accesses, by_chunk);
    uint64_t kept = begin;
    for (uint64_t k = begin; k < n; k++) {
      if (kept > begin && b->accesses[kept - 1].chunk == b->accesses[k].chunk) {
        uint32_t fresh = b->accesses[kept - 1].mode & b->accesses[k].mode & GMI_ACCESS_FRESH;
        b->accesses[kept - 1].mode =
            ((b->accesses[kept - 1].mode | b->accesses[k].mode) & ~(uint32_t)GMI_ACCESS_FRESH) | fresh;
      } else {
        b->accesses[kept++] = b->accesses[k];
      }
    }
    n = kept;
    const uint64_t need = pages + n - begin, frames = frame_count(b);
    const uint32_t sums =
        gmi_trace_pages(gmi_trace_sums_near(b->trace, i), gmi_frame_bytes(b->m), b->sizes.frame_bytes);
    b->ops[i].heap_frames += (uint32_t)gmi_frames_for_sums(sums, frames > need ? frames - need : 0);
  }
  if (fill) b->ops[b->trace->op_count] = (gmi_plan_op_t){ 0, 0, (uint32_t)n };
  b->access_count = n;
  return n < UINT32_MAX;
}

/* Appends chunk to the piece's list that begins at begin, unless it is there already: arenas that share bytes have
 * common chunks. */
static void add_chunk(uint32_t *list, uint64_t *count, uint64_t begin, uint32_t chunk) {
  for (uint64_t i = begin; i < *count; i++)
    if (list[i] == chunk) return;
  list[(*count)++] = chunk;
}

/* Chunks of parameters and gradients are the ones that ops use as well. */
static bool is_shared(const gmi_arena_t *a) { return a->kind == GEMINI_KIND_PARAM || a->kind == GEMINI_KIND_GRAD; }

/* Turns updates into pieces: consecutive elements up to the next multiple of gmi_piece_elements(), the unit in which
 * chunk/update.c runs an update. Within a piece, pass 0 adds the shared chunks and pass 1 the states, the order that
 * the policy expects. */
static bool build_pieces(builder_t *b, uint32_t *piece_first, bool fill) {
  gmi_manager_t *m = b->m;
  uint64_t pieces = 0, chunks = 0;
  for (uint32_t u = 0; u < b->trace->update_count; u++) {
    const gmi_trace_update_t *update = &b->trace->updates[u];
    for (uint32_t k = 0; k < update->arena_count; k++)
      if (!gmi_arena_at(m, update->arenas[k])) return false;
    uint64_t unit = gmi_piece_elements(m, update->arenas, update->arena_count, b->sizes.chunk_bytes);
    uint64_t end = update->first_element + update->element_count;
    if (piece_first) piece_first[u] = (uint32_t)pieces;
    for (uint64_t at = update->first_element; at < end; pieces++) {
      uint64_t stop = (at / unit + 1) * unit < end ? (at / unit + 1) * unit : end;
      uint64_t begin = chunks;
      uint32_t shared = 0, written = 0, read = 0, results = 0;
      for (int pass = 0; pass < 2; pass++) {
        for (uint32_t k = 0; k < update->arena_count; k++) {
          gmi_arena_t *a = gmi_arena_at(m, update->arenas[k]);
          if (is_shared(a) != (pass == 0)) continue;
          uint32_t first, last;
          if (!chunk_range(b, a->store, at * a->element_bytes, (stop - at) * a->element_bytes, &first, &last))
            return false;
          written += update->modes[k] & GEMINI_WRITE ? last - first + 1 : 0;
          read += update->modes[k] == GEMINI_READ ? last - first + 1 : 0;
          results += update->modes[k] == GEMINI_WRITE ? last - first + 1 : 0;
          for (uint32_t c = first; c <= last; c++) {
            if (fill) add_chunk(b->piece_chunks, &chunks, begin, b->base[a->store] + c);
            else chunks++;
          }
        }
        if (pass == 0) shared = (uint32_t)(chunks - begin);
      }
      if (fill) {
        uint32_t after = update->after_op ? update->after_op - 1 : b->trace->op_count - 1;
        b->pieces[pieces] = (gmi_plan_piece_t){ .after_op = after,
                                                .chunk_first = (uint32_t)begin,
                                                .shared_count = shared,
                                                .pass_slots = read > results ? read : results };
        const gmi_trace_t *trace = b->trace;
        if (trace->ahead && trace->ahead_count == b->piece_count && trace->ahead_ops[pieces] <= after) {
          b->pieces[pieces].ahead_op = trace->ahead_ops[pieces];
          b->pieces[pieces].ahead_slots = written;
        }
        /* holds the number of elements until gmi_plan_bundle_times() sets the time */
        b->pieces[pieces].host_ns = stop - at;
      }
      at = stop;
    }
  }
  if (piece_first) piece_first[b->trace->update_count] = (uint32_t)pieces;
  if (fill) b->pieces[pieces].chunk_first = (uint32_t)chunks;
  b->piece_count = (uint32_t)pieces;
  b->piece_chunk_count = chunks;
  return chunks < UINT32_MAX && pieces < UINT32_MAX;
}

/* ---- groups */
/* Is the chunk one that no piece updates, and that has never been written? Then it stays zero. */
static bool stays_zero(const builder_t *b, const gmi_chunk_t *c, uint32_t chunk) {
  if (!gmi_chunk_has(c, GMI_VALID_ZERO)) return false;
  for (uint64_t i = 0; i < b->piece_chunk_count; i++)
    if (b->piece_chunks[i] == chunk) return false;
  return true;
}

/* Translates gathers or sums. The arenas are cut as the plan has them: a sharded arena is not cut anew. */
static bool build_collectives(const builder_t *b, const gmi_trace_collective_t *from, uint32_t count,
                              gmi_plan_collective_t *to) {
  gmi_manager_t *m = b->m;
  for (uint32_t i = 0; i < count; i++) {
    const gmi_arena_t *a = gmi_arena_at(m, from[i].arena);
    if (!a || !gmi_arena_is_sharded(a) || from[i].chunk >= atomic_load(&a->chunk_count)) return false;
    gmi_slice_part_t parts[GMI_SLICE_PARTS];
    to[i] = (gmi_plan_collective_t){ .op = from[i].op,
                                     .use_op = from[i].use_op,
                                     .frame_op = from[i].frame_op,
                                     .group = b->plan_group[a->shard.group],
                                     .part_count = gmi_slice_parts(m, &a->chunks[from[i].chunk], parts),
                                     .bytes = b->sizes.chunk_bytes };
    for (uint32_t k = 0; k < to[i].part_count; k++) {
      const gmi_arena_t *slices = gmi_chunk_arena(m, parts[k].chunk);
      to[i].parts[k] = b->base[slices->index] + parts[k].chunk->index;
      to[i].part_bytes[k] =
          gmi_arena_is_gradients(a) || !stays_zero(b, parts[k].chunk, to[i].parts[k]) ? parts[k].bytes : 0;
      to[i].bytes -= parts[k].bytes;
    }
  }
  return true;
}

/* Lists the groups that have sharded arenas; returns their number. */
static uint32_t find_groups(builder_t *b) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < GMI_GROUPS; i++) {
    if (!gmi_group_at(b->m, i) || !gmi_group_at(b->m, i)->arenas) continue;
    b->plan_group[i] = count;
    b->group_of[count++] = i;
  }
  return count;
}

/* Mean number of chunks of a piece. */
static uint32_t piece_length(const builder_t *b) {
  /* all pieces are alike except at the edges of an update */
  uint64_t most = b->piece_count ? b->piece_chunk_count / b->piece_count : 0;
  return most ? (uint32_t)most : 1;
}

void gmi_trace_measure(gmi_manager_t *m, gmi_trace_t *trace) {
  const double host = gmi_workers_ns_per_element(m, GEMINI_PASS_BOTH);
  const struct {
    const gmi_link_t *link;
    uint64_t *rate;
  } rates[] = { { gmi_link_in(m), &trace->link_bytes_per_s[0] },
                { gmi_link_out(m), &trace->link_bytes_per_s[1] },
                { gmi_link_file(m, false), &trace->file_bytes_per_s[0] },
                { gmi_link_file(m, true), &trace->file_bytes_per_s[1] } };
  for (size_t i = 0; i < sizeof rates / sizeof *rates; i++)
    if (rates[i].link->chunk_ns.samples) *rates[i].rate = gmi_link_rate(m, rates[i].link);
  if (host > 0) trace->host_update_ps = (uint64_t)(host * 1e3) + 1;
  for (uint32_t i = 0; i < 2; i++) {
    const double pass = gmi_workers_ns_per_element(m, i ? GEMINI_PASS_STATES : GEMINI_PASS_RESULTS);
    if (pass > 0) trace->pass_ps[i] = (uint64_t)(pass * 1e3) + 1;
  }
  if (m->rate.device_update.samples) trace->device_update_ps = (uint64_t)(m->rate.device_update.mean * 1e3) + 1;
}

static uint64_t copy_ns(uint64_t bytes, uint64_t measured, uint64_t expected) {
  uint64_t rate = measured ? measured : expected; /* the expected rate serves until one has been measured */
  return (uint64_t)((double)bytes * 1e9 / (double)rate) + 1;
}

/* Estimates the nanoseconds per element of an update on the device from the rate of its memory, until one has been
 * measured: each read and each write of an element counts. 0: unknown. */
static double device_update_ns(gmi_manager_t *m, const gmi_trace_update_t *update) {
  uint64_t rate = m->device.ops->memory_bytes_per_s(m->device.self), bytes = 0;
  for (uint32_t i = 0; i < update->arena_count; i++)
    bytes += gmi_arena_at(m, update->arenas[i])->element_bytes * (update->modes[i] == GEMINI_READ_WRITE ? 2 : 1);
  return rate ? (double)bytes * 1e9 / (double)rate : 0;
}

/* Of the time of a whole update, until measured: AdamW with 15 threads on 8 cores
 * (bench/results/2026-12-01-passes-h200.md). */
static const double pass_shares[2] = { 0.75, 0.87 };

/* Can the update's pieces have two passes? As in chunk/passes.c. */
static bool has_passes(gmi_manager_t *m, const gmi_trace_update_t *update) {
  return update->passes && gmi_modes_have_passes(update->modes, update->arena_count) && !m->file.store &&
         gmi_arena_at(m, update->arenas[0])->shard.whole == GMI_NONE;
}

void gmi_plan_bundle_times(gmi_manager_t *m, const gmi_trace_t *trace, gmi_plan_bundle_t *bundle) {
  gmi_plan_input_t *in = &bundle->input;
  gmi_plan_op_t *ops = (gmi_plan_op_t *)(uintptr_t)in->ops;
  for (uint32_t i = 0; i < in->op_count; i++) ops[i].compute_ns = trace->ops[i].compute_ns;
  in->outside_ns = trace->outside_ns;
  const uint64_t link = m->device.ops->link_bytes_per_s, file = UINT64_C(1000000000);
  const uint64_t h2d = m->config.sim_h2d_bytes_per_s, d2h = m->config.sim_d2h_bytes_per_s;
  in->fetch_ns = copy_ns(in->link_bytes, trace->link_bytes_per_s[0], h2d ? h2d : link);
  in->evict_ns = copy_ns(in->link_bytes, trace->link_bytes_per_s[1], d2h ? d2h : link);
  for (uint32_t i = 0; i < in->groups.group_count; i++) {
    const gmi_group_t *g = gmi_group_at(m, bundle->group_of[i]);
    const uint64_t own_ns = g ? copy_ns(in->chunk_bytes, 0, link) : 0; /* until measured, as fast as the host's link */
    ((gmi_plan_group_t *)(uintptr_t)in->groups.links)[i] =
        (gmi_plan_group_t){ g && g->gathers.agreed_ns ? g->gathers.agreed_ns : own_ns,
                            g && g->sums.agreed_ns ? g->sums.agreed_ns : own_ns };
  }
  in->file_read_ns = copy_ns(in->file_bytes, trace->file_bytes_per_s[0], file);
  in->file_write_ns = copy_ns(in->file_bytes, trace->file_bytes_per_s[1], file);
  /* until measured: 28 bytes at 10 GB/s, in ns */
  double host = trace->host_update_ps ? (double)trace->host_update_ps * 1e-3 : 2.8;
  double pass_ns[2];
  for (int i = 0; i < 2; i++) pass_ns[i] = trace->pass_ps[i] ? (double)trace->pass_ps[i] * 1e-3 : host * pass_shares[i];
  in->host_delay_ns = 0;
  for (uint32_t u = 0, p = 0; u < trace->update_count; u++) {
    uint64_t unit = gmi_piece_elements(m, trace->updates[u].arenas, trace->updates[u].arena_count, in->chunk_bytes);
    uint64_t at = trace->updates[u].first_element, end = at + trace->updates[u].element_count;
    double device =
        trace->device_update_ps ? (double)trace->device_update_ps * 1e-3 : device_update_ns(m, &trace->updates[u]);
    if (!(device > 0)) device = host;
    for (; at < end; p++) {
      uint64_t stop = (at / unit + 1) * unit < end ? (at / unit + 1) * unit : end;
      gmi_plan_piece_t *piece = &((gmi_plan_piece_t *)(uintptr_t)in->pieces)[p];
      /* A worker looks for other work between slices only, takes part for one more slice, and slices of several
       * workers do not end at the same time: 3 slices of delay. */
      uint64_t slice_ns = (uint64_t)((double)(stop - at < GMI_WORKERS_SLICE ? stop - at : GMI_WORKERS_SLICE) * host);
      if (m->config.update_threads > 1 && in->host_delay_ns < 3 * slice_ns) in->host_delay_ns = 3 * slice_ns;
      piece->host_ns = (uint64_t)((double)(stop - at) * host / m->config.update_threads);
      piece->device_ns = (uint64_t)((double)(stop - at) * device);
      if (has_passes(m, &trace->updates[u])) { /* 0 would say that it has none */
        piece->result_ns = 1 + (uint64_t)((double)(stop - at) * pass_ns[0] / m->config.update_threads);
        piece->state_ns = (uint64_t)((double)(stop - at) * pass_ns[1] / m->config.update_threads);
      }
      at = stop;
    }
  }
}

/* Fills chunk_of from the manager's arenas, in the numbering of the plan. */
void gmi_plan_bundle_bind(gmi_manager_t *m, gmi_plan_bundle_t *bundle) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    for (uint32_t k = 0; a && gmi_arena_has_tiers(a) && k < atomic_load(&a->chunk_count); k++)
      bundle->chunk_of[n++] = &a->chunks[k];
  }
}

/* The most frames that the chunks of one chosen op take. Its uses are sorted. */
static uint32_t chosen_frames(builder_t *b) {
  uint32_t most = 0, frames = 0;
  const gmi_trace_chosen_t *before = NULL;
  for (uint32_t i = 0; i < b->trace->chosen.count; i++) {
    const gmi_trace_chosen_t *now = &b->trace->chosen.uses[i];
    uint32_t first, last, begun = 0, left = 0; /* begun: the use before ends in the first chunk, left, of this one */
    if (!chunk_range(b, now->use.arena, now->use.offset, now->use.size, &first, &last)) continue;
    if (!before || before->op != now->op) frames = 0;
    else if (before->use.arena == now->use.arena)
      begun = chunk_range(b, before->use.arena, before->use.offset, before->use.size, &left, &left) && left == first;
    frames += last - first + 1 - begun;
    if (frames > most) most = frames;
    before = now;
  }
  return most;
}

/* Makes the plan. Where ops are chosen, it leaves frames for two of them, so that the chunks of one can come while the
 * one before is computed; with less memory for one, with less still for none: then they take frames of the plan. */
static gemini_status_t make_plan(builder_t *b, gmi_plan_bundle_t *bundle, gmi_plan_failure_t *failure_out) {
  const uint32_t all = bundle->input.frame_count, chosen = chosen_frames(b);
  gemini_status_t status = GEMINI_ERR_OOM_DEVICE;
  for (uint32_t ops = chosen ? 3 : 1; status == GEMINI_ERR_OOM_DEVICE && ops-- > 0;) {
    if ((uint64_t)ops * chosen >= all) continue;
    bundle->input.frame_count = all - ops * chosen;
    status = gmi_plan_make(&bundle->input, &bundle->plan, failure_out);
  }
  return status;
}

/* Of the host, for new values beside old ones. In a forecast no chunk has a slot yet. */
static uint32_t spare_slots(gmi_manager_t *m, uint64_t chunks) {
  if (!m->trace.plans_only) return gmi_host_spare(m);
  return m->host.slot_count > chunks ? (uint32_t)(m->host.slot_count - chunks) : 0;
}

gemini_status_t gmi_plan_bundle_make(gmi_manager_t *m, const gmi_trace_t *trace, uint32_t shift,
                                     gmi_plan_bundle_t *out) {
  builder_t b = { .m = m, .trace = trace, .shift = shift, .sizes = gmi_sizes_of(m, UINT64_C(1) << shift) };
  const bool cut_so = shift == m->cut.chunk_shift;
  const bool has_files = m->file.store || m->file.borrowed || (m->trace.plans_only && m->config.file_bytes);
  const bool short_home = cut_so && gmi_home_is_short(m);
  gmi_plan_bundle_t bundle = { 0 };
  gemini_status_t status = GEMINI_OK;
  uint64_t chunks = 0;
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    b.base[i] = (uint32_t)chunks;
    if (!a || !gmi_arena_has_tiers(a)) continue;
    b.count[i] = (uint32_t)((atomic_load(&a->size) + b.sizes.chunk_bytes - 1) >> shift);
    chunks += b.count[i];
  }
  if (chunks >= UINT32_MAX || !build_accesses(&b, false) || !build_pieces(&b, NULL, false))
    return gmi_fail(GEMINI_ERR_FORMAT, 0, "the trace uses bytes that the arenas do not have");
  b.ops = calloc((size_t)trace->op_count + 1, sizeof *b.ops);
  b.accesses = calloc(b.access_count + 1, sizeof *b.accesses);
  b.pieces = calloc((size_t)b.piece_count + 1, sizeof *b.pieces);
  b.piece_chunks = calloc(b.piece_chunk_count + 1, sizeof *b.piece_chunks);
  b.kind = calloc(chunks + 1, 1);
  b.pinned = calloc(chunks + 1, 1);
  b.has_slot = calloc(chunks + 1, 1);
  bundle.chunk_of = calloc(chunks + 1, sizeof *bundle.chunk_of);
  bundle.piece_first = calloc((size_t)trace->update_count + 1, sizeof *bundle.piece_first);
  b.gathers = calloc((size_t)trace->gather_count + 1, sizeof *b.gathers);
  b.sums = calloc((size_t)trace->sum_count + 1, sizeof *b.sums);
  b.links = calloc(GMI_GROUPS, sizeof *b.links);
  bundle.group_of = calloc(GMI_GROUPS, sizeof *bundle.group_of);
  bundle.input = (gmi_plan_input_t){ .op_count = trace->op_count,
                                     .chunk_count = (uint32_t)chunks,
                                     .frame_count = frame_count(&b),
                                     .host_slots = has_files || short_home ? m->host.slot_count : 0,
                                     .home_slots = short_home ? home_slots_to_fill(m) : 0,
                                     .host_pieces_ahead = gmi_updates_ahead(m, piece_length(&b)),
                                     .spare_slots = cut_so ? spare_slots(m, chunks) : 0,
                                     .ops = b.ops,
                                     .accesses = b.accesses,
                                     .pieces = b.pieces,
                                     .piece_chunks = b.piece_chunks,
                                     .chunk_kind = b.kind,
                                     .chunk_pinned = b.pinned,
                                     .chunk_has_slot = b.has_slot,
                                     .chunk_bytes = b.sizes.chunk_bytes,
                                     .frame_bytes = b.sizes.frame_bytes,
                                     .link_bytes = gmi_sizes_copy_bytes(&b.sizes, GEMINI_TIER_DEVICE, GEMINI_TIER_HOST),
                                     .file_bytes = gmi_sizes_copy_bytes(&b.sizes, GEMINI_TIER_HOST, GEMINI_TIER_FILE),
                                     .placement = m->config.placement,
                                     .pieces_apart = m->config.device == GEMINI_DEVICE_SIMULATED,
                                     .static_param_fraction = m->config.static_param_fraction,
                                     .static_optim_fraction = m->config.static_optim_fraction,
                                     .groups = { .gather_count = trace->gather_count,
                                                 .sum_count = trace->sum_count,
                                                 .group_count = find_groups(&b),
                                                 .gathers = b.gathers,
                                                 .sums = b.sums,
                                                 .links = b.links } };
  if (!b.ops || !b.accesses || !b.pieces || !b.piece_chunks || !b.kind || !b.pinned || !b.has_slot ||
      !bundle.chunk_of || !bundle.piece_first || !b.gathers || !b.sums || !b.links || !bundle.group_of)
    status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory to make a plan");
  if (!status) {
    build_accesses(&b, true);
    build_pieces(&b, bundle.piece_first, true);
    bundle.input.piece_count = b.piece_count;
    for (uint32_t i = 0; i < GMI_ARENAS; i++) {
      gmi_arena_t *a = gmi_arena_at(m, i);
      for (uint32_t k = 0; a && k < b.count[i]; k++) {
        b.kind[b.base[i] + k] = (uint8_t)a->kind;
        b.pinned[b.base[i] + k] = cut_so && gmi_chunk_is_pinned(&a->chunks[k]) > 0;
        /* where the host is short of room, chunks without a home take such slots */
        b.has_slot[b.base[i] + k] = cut_so && !has_files && !short_home && gmi_chunk_has_slot(&a->chunks[k]);
      }
    }
    memcpy(bundle.group_of, b.group_of, sizeof b.group_of);
    if (!build_collectives(&b, trace->gathers, trace->gather_count, b.gathers) ||
        !build_collectives(&b, trace->sums, trace->sum_count, b.sums))
      status = gmi_fail(GEMINI_ERR_FORMAT, 0, "the trace gathers chunks that the arenas do not have");
  }
  if (!status) {
    if (cut_so) gmi_plan_bundle_bind(m, &bundle);
    gmi_plan_bundle_times(m, trace, &bundle);
    gmi_plan_failure_t failure = { 0 };
    gmi_wait_t wait;
    gmi_wait_begin(m, &wait, NULL, GMI_WAIT_PLAN, 0);
    status = make_plan(&b, &bundle, &failure);
    gmi_wait_end(m, &wait);
    uint64_t frame_bytes = bundle.input.frame_bytes;
    if (status == GEMINI_ERR_OOM_DEVICE)
      gmi_fail(
          status, 0,
          "op %s: its chunks and non-model memory need %llu bytes of device memory, %llu more than the %llu there are",
          failure.op < trace->op_count ? trace->ops[failure.op].name : "?",
          (unsigned long long)(failure.need_frames * frame_bytes),
          (unsigned long long)((failure.need_frames - failure.have_frames) * frame_bytes),
          (unsigned long long)(failure.have_frames * frame_bytes));
    else if (status) gmi_fail(status, 0, "no plan could be made: %s", gemini_status_string(status));
  }
  bundle.made = status == GEMINI_OK;
  bundle.ahead = trace->ahead;
  for (uint32_t p = 0; bundle.made && p < b.piece_count; p++) bundle.plans_ahead |= bundle.plan.piece_ahead[p];
  if (status) gmi_plan_bundle_free(&bundle);
  else *out = bundle;
  return status;
}

void gmi_plan_bundle_free(gmi_plan_bundle_t *bundle) {
  if (bundle->made) gmi_plan_free(&bundle->plan);
  free((void *)(uintptr_t)bundle->input.ops);
  free((void *)(uintptr_t)bundle->input.accesses);
  free((void *)(uintptr_t)bundle->input.pieces);
  free((void *)(uintptr_t)bundle->input.piece_chunks);
  free((void *)(uintptr_t)bundle->input.chunk_kind);
  free((void *)(uintptr_t)bundle->input.chunk_pinned);
  free((void *)(uintptr_t)bundle->input.chunk_has_slot);
  free((void *)(uintptr_t)bundle->input.groups.gathers);
  free((void *)(uintptr_t)bundle->input.groups.sums);
  free((void *)(uintptr_t)bundle->input.groups.links);
  free(bundle->group_of);
  free(bundle->chunk_of);
  free(bundle->piece_first);
  free(bundle->reads.fetched);
  memset(bundle, 0, sizeof *bundle);
}

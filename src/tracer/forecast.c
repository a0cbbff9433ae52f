/* What an iteration would take, from its trace alone: gemini_plan_forecast() of api/forecast.c.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The manager was made for this (m->trace.plans_only): reading the trace makes its arenas. All figures are those of the
 * plan, but the needs of host and files, which are those of an iteration without one: no piece of an update runs on the
 * device then, so every chunk that updates name has its place below the device (walk_room() of chunk/update.c). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "chunk/arena.h"
#include "chunk/cut.h"
#include "tracer/tracer.h"

static uint64_t least_of(uint64_t a, uint64_t b) { return a < b ? a : b; }
static uint64_t missing(uint64_t needed, uint64_t there) { return needed > there ? needed - there : 0; }

/* The most frames that an op takes, for its chunks and for non-model memory. */
static uint64_t largest_op(const gmi_plan_input_t *in) {
  uint64_t most = 0;
  for (uint32_t op = 0; op < in->op_count; op++) {
    uint64_t frames = in->ops[op + 1].access_first - in->ops[op].access_first + in->ops[op].heap_frames;
    if (frames > most) most = frames;
  }
  return most;
}

/* Carries out moves from *at on, up to the last one of op that is for none of its pieces (pieces false) or for one.
 * Returns the change of the number of resident chunks. */
static int64_t carry_out(const gmi_plan_move_t *moves, uint32_t end, uint32_t *at, bool pieces, bool fetch,
                         uint8_t *resident) {
  int64_t change = 0;
  for (; *at < end && (pieces || moves[*at].piece == GMI_NO_PIECE); ++*at) {
    uint8_t *there = &resident[moves[*at].chunk];
    change += (int64_t)fetch - *there;
    *there = fetch;
  }
  return change;
}

/* The most frames in use under a plan, at any stage. Chunks that the op before has left may still hold theirs when the
 * next is fetched, but no stage takes more than there are. GEMINI_ERR_OOM_SYSTEM: no memory. */
static gemini_status_t frames_used(const gmi_plan_input_t *in, const gmi_plan_t *plan, uint64_t *frames_out) {
  uint8_t *resident = malloc((size_t)in->chunk_count + 1);
  if (!resident) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory to forecast %u chunks", in->chunk_count);
  memcpy(resident, plan->resident_at_start, in->chunk_count);
  int64_t count = 0;
  uint64_t most = 0;
  for (uint32_t i = 0; i < in->chunk_count; i++) count += resident[i];
  for (uint32_t op = 0; op < in->op_count; op++) {
    uint32_t fetch = plan->fetch_first[op], evict = plan->evict_first[op];
    for (int pieces = 0; pieces < 2; pieces++) {
      count += carry_out(plan->fetches, plan->fetch_first[op + 1], &fetch, pieces, true, resident);
      for (uint32_t i = in->ops[op].access_first; !pieces && i < in->ops[op + 1].access_first; i++) {
        count += !resident[in->accesses[i].chunk];
        resident[in->accesses[i].chunk] = 1;
      }
      if ((uint64_t)count + in->ops[op].heap_frames > most) most = (uint64_t)count + in->ops[op].heap_frames;
      count += carry_out(plan->evicts, plan->evict_first[op + 1], &evict, pieces, false, resident);
    }
  }
  free(resident);
  *frames_out = least_of(most, in->frame_count);
  return GEMINI_OK;
}

/* Fetches that copy nothing, as their chunk reads as zero until the iteration writes to it, which the plan does not
 * know. Those for the first op that accesses a chunk. GEMINI_ERR_OOM_SYSTEM: no memory. */
static gemini_status_t zeros_fetched(gmi_manager_t *m, const gmi_trace_t *trace, const gmi_plan_bundle_t *b,
                                     uint64_t *count_out) {
  const gmi_plan_input_t *in = &b->input;
  uint32_t *first = malloc(((size_t)in->chunk_count + 1) * sizeof *first);
  if (!first) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory to forecast %u chunks", in->chunk_count);
  memset(first, 0xff, in->chunk_count * sizeof *first);
  for (uint32_t op = in->op_count; op-- > 0;)
    for (uint32_t i = in->ops[op].access_first; i < in->ops[op + 1].access_first; i++)
      first[in->accesses[i].chunk] = op;
  *count_out = 0;
  for (uint32_t i = 0; i < b->plan.fetch_first[in->op_count]; i++) {
    const gmi_plan_move_t *fetch = &b->plan.fetches[i];
    *count_out += fetch->use_piece == GMI_NO_PIECE && fetch->use_op == first[fetch->chunk] &&
                  trace->zeroed[gmi_chunk_arena(m, b->chunk_of[fetch->chunk])->index];
  }
  free(first);
  return GEMINI_OK;
}

/* What the tiers below the device need. Of files, blocks are as large as slots. States that stay on the device because
 * these tiers lack room need none there. */
static void below_device(const gmi_manager_t *m, const gmi_plan_bundle_t *b, gemini_forecast_t *f) {
  const gmi_plan_input_t *in = &b->input;
  const uint64_t slot_bytes = gmi_slot_bytes(m);
  const uint64_t host = m->config.host_bytes - m->config.host_bytes % slot_bytes;
  const uint64_t file = m->config.file_bytes - m->config.file_bytes % slot_bytes;
  const uint64_t piece = gmi_plan_largest_piece(in); /* with files: a piece's chunks are on the host at once */
  uint64_t below = in->chunk_count;
  for (uint32_t i = 0; in->home_slots && !f->lacks && i < in->chunk_count; i++)
    below -= b->plan.stays[i] && in->chunk_kind[i] != GEMINI_KIND_PARAM && in->chunk_kind[i] != GEMINI_KIND_GRAD;
  f->host_needed = missing(below * slot_bytes, file);
  if (f->host_needed < piece * slot_bytes) f->host_needed = piece * slot_bytes;
  if (m->config.file_bytes) f->file_needed = missing(below * slot_bytes, host);
  if (host < f->host_needed) f->lacks |= 1 << GEMINI_TIER_HOST;
  if (file < f->file_needed) f->lacks |= 1 << GEMINI_TIER_FILE;
}

static gemini_status_t of_plan(gmi_manager_t *m, const gmi_trace_t *trace, const gmi_plan_bundle_t *b,
                               gemini_forecast_t *f) {
  const gmi_plan_input_t *in = &b->input;
  const gmi_plan_t *plan = &b->plan;
  uint64_t frames = 0, starts = 0, stays = 0, zeros = 0;
  gemini_status_t status = frames_used(in, plan, &frames);
  if (!status) status = zeros_fetched(m, trace, b, &zeros);
  for (uint32_t i = 0; i < in->chunk_count; i++) starts += plan->resident_at_start[i], stays += plan->stays[i];
  const uint64_t slot_bytes = gmi_slot_bytes(m), host = m->config.host_bytes - m->config.host_bytes % slot_bytes;
  f->binds = gmi_plan_binds(plan);
  f->device_bytes = frames * in->frame_bytes;
  f->host_bytes = least_of(host, in->chunk_count * slot_bytes);
  f->file_bytes = m->config.file_bytes ? missing((in->chunk_count - starts) * slot_bytes, host) : 0;
  f->stays_bytes = stays * in->chunk_bytes;
  f->fetch_bytes = (plan->fetch_count - zeros) * in->link_bytes;
  f->evict_bytes = plan->evict_dirty_count * in->link_bytes;
  f->read_bytes = plan->file_chunks * in->file_bytes;
  f->device_pieces = plan->device_piece_count;
  f->host_pieces = plan->piece_count - plan->device_piece_count;
  f->step_ns = plan->predicted_ns;
  f->stall_ns = plan->predicted_ns - plan->compute_ns;
  f->compute_ns = plan->compute_ns;
  f->fetch_ns = plan->fetch_busy_ns;
  f->evict_ns = plan->evict_busy_ns;
  f->update_ns = plan->update_busy_ns;
  f->file_ns = plan->file_busy_ns;
  return status;
}

static gemini_status_t explain(const gmi_trace_t *trace, const gmi_plan_bundle_t *b, char **text_out) {
  const char **names = calloc((size_t)trace->op_count + 1, sizeof *names);
  for (uint32_t i = 0; names && i < trace->op_count; i++) names[i] = trace->ops[i].name;
  uint64_t length = names ? gmi_plan_explain(&b->input, &b->plan, names, NULL, 0) : 0;
  *text_out = names ? malloc(length + 1) : NULL;
  if (*text_out) gmi_plan_explain(&b->input, &b->plan, names, *text_out, length + 1);
  free(names);
  return *text_out ? GEMINI_OK : gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory to explain the plan");
}

/* Plans; if the device lacks room, once more with room for everything, only to find out how much there has to be. */
gemini_status_t gmi_trace_forecast(gmi_manager_t *m, const char *path, gemini_forecast_t *forecast_out,
                                   char **text_out) {
  gmi_trace_t trace = { 0 };
  gmi_plan_bundle_t bundle = { 0 };
  gemini_forecast_t f = GEMINI_FORECAST_INIT;
  const uint64_t budget = m->config.device_bytes; /* the manager may get more, below and in gmi_trace_read() */
  gemini_status_t status = gmi_trace_read(m, &trace, path);
  if (status) return status;
  status = gmi_plan_bundle_make(m, &trace, m->cut.chunk_shift, &bundle);
  const bool lacking = status == GEMINI_ERR_OOM_DEVICE;
  if (lacking) {
    uint64_t pages = 0;
    for (uint32_t i = 0; i < trace.op_count; i++)
      if (trace.ops[i].heap_pages > pages) pages = trace.ops[i].heap_pages;
    m->config.device_bytes = m->config.device_margin_bytes + (m->cut.chunk_count + pages) * gmi_frame_bytes(m);
    status = gmi_plan_bundle_make(m, &trace, m->cut.chunk_shift, &bundle);
  }
  if (status == GEMINI_ERR_INVALID)
    status = gmi_fail(GEMINI_ERR_FORMAT, 0, "trace %s: no plan can be made from it: its times or counts are too large",
                      path);
  char *text = NULL;
  if (!status) {
    f.placement = m->config.placement;
    f.chunk_bytes = gmi_chunk_bytes(m);
    f.model_bytes = bundle.input.chunk_count * f.chunk_bytes;
    f.device_needed = m->config.device_margin_bytes + largest_op(&bundle.input) * gmi_frame_bytes(m);
    if (lacking || budget < f.device_needed) f.lacks = 1 << GEMINI_TIER_DEVICE;
    below_device(m, &bundle, &f);
    if (f.lacks & 1 << GEMINI_TIER_DEVICE) {
      text = calloc(1, 1);
      if (!text) status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a forecast");
    } else {
      status = of_plan(m, &trace, &bundle, &f);
      if (!status) status = explain(&trace, &bundle, &text);
    }
  }
  if (bundle.made) gmi_plan_bundle_free(&bundle);
  gmi_trace_free(&trace);
  if (status) return status;
  *forecast_out = f;
  *text_out = text;
  return GEMINI_OK;
}

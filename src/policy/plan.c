/* Makes the plan: chooses which pieces run on the device and how many frames to hold back for early fetches. Implements
 * gmi_plan_make() and gmi_plan_simulate(), which tracer/plan_input.c and tracer/tracer.c call; docs/policy.md describes
 * the choice.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A candidate is a triple (device_count, reduce, hold): the first device_count pieces of an order of preference run on
 * the device, MIN works with reduce frames less than available, and the states of the first hold pieces stay on the
 * device for good. Reducing costs fetches, but leaves frames for fetches that start earlier. MIN makes the fewest
 * fetches, whatever they bring: to keep a parameter between two uses it lets a state come and go, which has to be
 * written back, too, and needs a slot of the host. Without pieces, what stays on the device is also spread evenly
 * (spread.c). Each candidate is planned (belady.c, schedule.c) and simulated (simulate.c), and the one with the
 * shortest predicted iteration wins. Only one plan exists at a time; the best one is made again at the end. */
#include <stdlib.h>
#include <string.h>

#include "policy/model.h"

/* The budget of visits (of accesses, stages and moves) for all candidates together: planning must end within a second
 * on one core for 300,000 accesses. The budget counts visits instead of time, so that the same input gives the same
 * plan. */
#define WORK_LIMIT UINT64_C(40000000)
#define SIMULATE_VISITS 5 /* cost of a candidate's schedule and simulation, in visits per access and move */
#define SPREAD_PASSES 32  /* cost of gmi_spread_make(), in visits per access and stage */
#define MAX_CANDIDATES 64
#define TIME_LIMIT_NS (UINT64_C(1) << 59)

/* ONE: in one pass each, or ahead, while there are spare slots. PASSES: in two, or ahead, if slots are left. RESULTS:
 * in two, the first of them ahead. MOST, HALF: three quarters, or half of them so, the rest in one. BOTH: as RESULTS,
 * but with the slots that are left, all is computed ahead. */
enum { HOST_ONE, HOST_PASSES, HOST_RESULTS, HOST_MOST, HOST_HALF, HOST_BOTH };

typedef struct candidate {
  uint32_t device_count;         /* number of pieces that run on the device: the first ones of planner_t.order */
  uint32_t reduce;               /* frames that MIN does not use, so that fetches can start earlier */
  uint32_t ring;                 /* not 0: gmi_spread_make() with such a ring takes the place of MIN */
  uint32_t hold;                 /* number of pieces, at most device_count, whose states stay on the device for good */
  uint8_t host;                  /* how host pieces run: HOST_* */
  uint64_t predicted_ns, copies; /* chunks fetched and written back */
} candidate_t;

/* State of gmi_plan_make(). Invariants: model and optimum belong to model_count pieces on the device, of which
 * model_hold have their states there for good (use_model()), and are zeroed if model_count is NONE; plan belongs to the
 * candidate at. */
typedef struct planner {
  const gmi_plan_input_t *input;
  gmi_facts_t facts;
  uint32_t *order;                   /* [order_count] pieces that may run on the device, most preferred first */
  uint32_t order_count, model_count; /* model_count: pieces on the device in model; NONE: there is no model */
  uint32_t model_hold;
  uint32_t bound_count; /* pieces on the device in plans of which none fetches less than bound; NONE: not found yet */
  uint64_t bound;
  /* [chunk_count] 1: pinned; 2: state chunk of a device piece that stays for good; 0: neither */
  uint8_t *held;
  uint8_t host; /* of the next candidate */
  bool files;   /* the host has no room for all states, so the states of device pieces stay on the device for good */
  uint8_t *on_device; /* [piece_count] */
  uint32_t *stamp;    /* [chunk_count] scratch: marks chunks that were counted */
  uint32_t stamp_now, candidates;
  gmi_model_t model;
  gmi_hits_t optimum;   /* MIN's decisions for model, with all frames */
  uint64_t work;        /* visits left of WORK_LIMIT */
  gmi_plan_t plan;      /* plan of the candidate at */
  candidate_t at, best; /* at: the candidate of plan; best: the best so far, device_count NONE if there is none */
} planner_t;
#define NONE UINT32_MAX

void gmi_plan_free(gmi_plan_t *plan) {
  if (plan == NULL) return;
  free(plan->fetches);
  free(plan->fetch_first);
  free(plan->evicts);
  free(plan->evict_first);
  free(plan->piece_on_device);
  free(plan->piece_ahead);
  free(plan->piece_passes);
  free(plan->resident_at_start);
  free(plan->stays);
  free(plan->next_use);
  free(plan->piece_use);
  free(plan->traffic);
  memset(plan, 0, sizeof *plan);
}

/* Adds count * ns to *sum. False: overflow, or the sum exceeds TIME_LIMIT_NS. The simulation adds up to six
 * iterations and relies on this limit. */
static bool add_time(uint64_t *sum, uint64_t count, uint64_t ns) {
  uint64_t product;
  return !__builtin_mul_overflow(count, ns, &product) && !__builtin_add_overflow(*sum, product, sum) &&
         *sum <= TIME_LIMIT_NS;
}

static bool scalars_are_valid(const gmi_plan_input_t *input) {
  const uint32_t most = GMI_MODEL_CHUNK;
  return input->op_count > 0 && input->op_count < most && input->chunk_count < most && input->piece_count < most &&
         input->ops != NULL && (input->chunk_count == 0 || input->chunk_kind != NULL) &&
         (input->piece_count == 0 || (input->pieces != NULL && input->piece_chunks != NULL)) &&
         input->placement < GMI_PLACEMENTS && input->static_param_fraction >= 0 && input->static_param_fraction <= 1 &&
         input->static_optim_fraction >= 0 && input->static_optim_fraction <= 1;
}

static bool collectives_are_valid(const gmi_plan_input_t *input, const gmi_plan_collective_t *all, uint32_t count,
                                  uint64_t *total_ns) {
  for (uint32_t i = 0; i < count; i++) {
    const gmi_plan_collective_t *c = &all[i];
    if (c->op >= input->op_count || c->use_op >= input->op_count || c->use_op < c->op ||
        c->group >= input->groups.group_count || c->part_count > GMI_PLAN_PARTS ||
        (c->frame_op != GMI_NO_OP && c->frame_op >= c->op) ||
        (i > 0 && (c->op < all[i - 1].op || c->use_op < all[i - 1].use_op)))
      return false;
    for (uint32_t k = 0; k < c->part_count; k++)
      if (c->parts[k] >= input->chunk_count || c->part_bytes[k] > input->link_bytes) return false;
    if (!add_time(total_ns, 1, input->groups.links[c->group].gather_ns) ||
        !add_time(total_ns, 1, input->groups.links[c->group].sum_ns) ||
        !add_time(total_ns, GMI_PLAN_PARTS, input->fetch_ns) || !add_time(total_ns, GMI_PLAN_PARTS, input->evict_ns))
      return false;
  }
  return true;
}

/* seen: [chunk_count] zeroed; holds the piece (+ 1) that named the chunk last, to find a chunk named twice in a
 * piece */
static bool input_is_valid(const gmi_plan_input_t *input, uint32_t *seen) {
  uint32_t accesses = input->ops[input->op_count].access_first;
  uint64_t total_ns = 0, piece_chunks = 0;
  if (!add_time(&total_ns, 1, input->outside_ns)) return false;
  if (input->ops[0].access_first != 0 || (accesses > 0 && input->accesses == NULL)) return false;
  for (uint32_t op = 0; op < input->op_count; op++) {
    uint32_t first = input->ops[op].access_first, end = input->ops[op + 1].access_first;
    if (first > end || end > accesses || !add_time(&total_ns, 1, input->ops[op].compute_ns)) return false;
    for (uint32_t x = first; x < end; x++) {
      uint32_t mode = input->accesses[x].mode;
      if (input->accesses[x].chunk >= input->chunk_count || mode == 0 || mode > 7) return false;
      if (x > first && input->accesses[x].chunk <= input->accesses[x - 1].chunk) return false;
    }
  }
  for (uint32_t p = 0; p < input->piece_count; p++) {
    const gmi_plan_piece_t *piece = &input->pieces[p];
    if (piece->after_op >= input->op_count || (p == 0 && piece->chunk_first != 0)) return false;
    if (piece->ahead_slots > 0 && piece->ahead_op > piece->after_op) return false;
    if (piece->chunk_first > gmi_plan_piece_end(input, p)) return false;
    if (piece->shared_count > gmi_plan_piece_end(input, p) - piece->chunk_first) return false;
    if (!add_time(&total_ns, 1, piece->host_ns) || !add_time(&total_ns, 1, piece->device_ns)) return false;
    for (uint32_t i = piece->chunk_first; i < gmi_plan_piece_end(input, p); i++) {
      if (input->piece_chunks[i] >= input->chunk_count || seen[input->piece_chunks[i]] == p + 1) return false;
      seen[input->piece_chunks[i]] = p + 1;
    }
    piece_chunks += gmi_plan_piece_end(input, p) - piece->chunk_first;
  }
  if (!collectives_are_valid(input, input->groups.gathers, input->groups.gather_count, &total_ns) ||
      !collectives_are_valid(input, input->groups.sums, input->groups.sum_count, &total_ns))
    return false;
  /* Indices of accesses, including those of pieces, need one bit for GMI_MODEL_LEAVE. */
  return accesses + piece_chunks < GMI_MODEL_INDEX && add_time(&total_ns, accesses + piece_chunks, input->fetch_ns) &&
         add_time(&total_ns, accesses + piece_chunks, input->evict_ns) &&
         add_time(&total_ns, piece_chunks, input->file_read_ns) &&
         add_time(&total_ns, piece_chunks, input->file_write_ns);
}

static gemini_status_t check_input(const gmi_plan_input_t *input) {
  if (!scalars_are_valid(input)) return GEMINI_ERR_INVALID;
  uint32_t *seen = calloc((size_t)input->chunk_count + 1, sizeof *seen);
  if (seen == NULL) return GEMINI_ERR_OOM_SYSTEM;
  bool valid = input_is_valid(input, seen);
  free(seen);
  return valid ? GEMINI_OK : GEMINI_ERR_INVALID;
}

gemini_status_t gmi_plan_simulate(const gmi_plan_input_t *input, gmi_plan_t *plan) {
  gmi_facts_t facts;
  gemini_status_t status = check_input(input);
  if (status == GEMINI_OK) status = gmi_facts_make(input, &facts);
  if (status != GEMINI_OK) return status;
  status = gmi_simulate(&facts, plan, NULL);
  gmi_facts_free(&facts);
  return status;
}

/* Frames that an op or a piece needs for chunks that are not held. */
static uint64_t op_need(const gmi_plan_input_t *input, const uint8_t *held, uint32_t op) {
  uint64_t need = 0;
  for (uint32_t x = input->ops[op].access_first; x < input->ops[op + 1].access_first; x++)
    need += !held[input->accesses[x].chunk];
  return need;
}
static uint64_t piece_need(const gmi_plan_input_t *input, const uint8_t *held, uint32_t piece) {
  uint64_t need = 0;
  for (uint32_t i = input->pieces[piece].chunk_first; i < gmi_plan_piece_end(input, piece); i++)
    need += !held[input->piece_chunks[i]];
  return need;
}

/* Returns whether every op, and every piece marked in on_device (NULL: none), fits beside the held chunks. If not,
 * fills failure_out (may be NULL) with the first op that does not fit; of that op and its device pieces, with the
 * largest need. */
static bool stages_fit(const gmi_plan_input_t *input, const uint8_t *held, const uint8_t *on_device,
                       gmi_plan_failure_t *failure_out) {
  uint64_t held_count = 0;
  gmi_plan_failure_t failure = { NONE, 0, 0, input->frame_count };
  for (uint32_t c = 0; c < input->chunk_count; c++) held_count += held[c] != 0;
  for (uint32_t op = 0; op < input->op_count && failure.op == NONE; op++) {
    uint64_t need = op_need(input, held, op) + held_count + input->ops[op].heap_frames;
    if (need > input->frame_count) failure.op = op, failure.need_frames = need;
  }
  for (uint32_t p = 0; on_device != NULL && p < input->piece_count; p++) {
    uint32_t op = input->pieces[p].after_op;
    if (!on_device[p] || op > failure.op) continue;
    uint64_t need = piece_need(input, held, p) + held_count + input->ops[op].heap_frames;
    if (need > input->frame_count && (op < failure.op || need > failure.need_frames))
      failure.op = op, failure.need_frames = need;
  }
  if (failure.op != NONE && failure_out != NULL) *failure_out = failure;
  return failure.op == NONE;
}

static void drop_model(planner_t *p) {
  gmi_hits_free(&p->optimum);
  gmi_model_free(&p->model);
  p->model_count = NONE;
}

/* Visits of one pass over the model: the unit in which costs are estimated. */
static uint64_t model_visits(const gmi_model_t *model) { return (uint64_t)model->access_count + model->stage_count; }

static void spend(planner_t *p, uint64_t visits) { p->work -= visits < p->work ? visits : p->work; }

/* Marks the state chunks of a piece as held for good. */
static void hold_states(planner_t *p, uint32_t piece) {
  const gmi_plan_piece_t *at = &p->input->pieces[piece];
  for (uint32_t i = at->chunk_first + at->shared_count; i < gmi_plan_piece_end(p->input, piece); i++)
    if (!p->held[p->input->piece_chunks[i]]) p->held[p->input->piece_chunks[i]] = 2;
}

/* Returns whether the host lacks room for the chunks of all pieces (states and shared ones). seen: [chunk_count]
 * zeroed; zeroed again on return. */
static bool host_is_short(const gmi_plan_input_t *input, uint8_t *seen) {
  uint64_t chunks = 0;
  for (uint32_t i = 0; i < input->pieces[input->piece_count].chunk_first; i++) {
    chunks += !seen[input->piece_chunks[i]];
    seen[input->piece_chunks[i]] = 1;
  }
  memset(seen, 0, input->chunk_count);
  return input->host_slots > 0 && chunks > input->host_slots;
}

/* Marks the first device_count pieces of the order as on the device, and the states of the first hold ones as held, but
 * those that a host piece needs as well. If files is set, the states of all of them. */
static void mark(planner_t *p, uint32_t device_count, uint32_t hold) {
  const gmi_plan_input_t *input = p->input;
  memset(p->on_device, 0, input->piece_count);
  for (uint32_t i = 0; i < device_count; i++) p->on_device[p->order[i]] = 1;
  for (uint32_t c = 0; c < input->chunk_count; c++) p->held[c] = p->held[c] == 1;
  for (uint32_t i = 0; i < (p->files ? device_count : hold); i++) hold_states(p, p->order[i]);
  if (p->files || hold == 0) return;
  for (uint32_t piece = 0; piece < input->piece_count; piece++)
    for (uint32_t i = input->pieces[piece].chunk_first; !p->on_device[piece] && i < gmi_plan_piece_end(input, piece);
         i++)
      p->held[input->piece_chunks[i]] = p->held[input->piece_chunks[i]] == 1;
}

/* Makes p->model and p->optimum for such pieces, and finds p->bound, unless they are there already. */
static gemini_status_t use_model(planner_t *p, uint32_t device_count, uint32_t hold) {
  if (p->model_count == device_count && p->model_hold == hold) return GEMINI_OK;
  gemini_status_t status = GEMINI_OK;
  if (hold > 0 && p->bound_count != device_count) status = use_model(p, device_count, 0);
  if (status != GEMINI_OK) return status;
  drop_model(p);
  mark(p, device_count, hold);
  status = gmi_model_make(&p->facts, p->on_device, p->held, &p->model);
  if (status != GEMINI_OK) return status;
  spend(p, 3 * model_visits(&p->model));
  status = gmi_min_make(&p->model, 0, &p->optimum);
  spend(p, p->optimum.visits);
  if (status != GEMINI_OK) {
    gmi_model_free(&p->model);
    return status;
  }
  p->model_count = device_count, p->model_hold = hold;
  if (hold == 0) p->bound_count = device_count, p->bound = p->optimum.bound_count;
  return GEMINI_OK;
}

static bool is_state(const gmi_plan_input_t *input, uint32_t chunk) {
  const uint8_t kind = input->chunk_kind[chunk];
  return kind == GEMINI_KIND_MASTER || kind == GEMINI_KIND_MOMENTUM || kind == GEMINI_KIND_VARIANCE;
}

/* Has host pieces run in two passes, if the candidate says so, and computed ahead, while there are spare slots: those
 * first whose chunks are used soonest afterwards, as their uses could wait least. Passes come first, as they take fewer
 * slots for the time that they gain. What is computed ahead keeps slots busy that gradients then wait for, unless as
 * many are left as the passes take. Where first passes are computed ahead, all of a piece is if it has the longest time
 * until its next use: that is less work, but more of it before the step. */
static void choose_host(const planner_t *p, gmi_plan_t *plan) {
  const uint32_t pieces = p->input->piece_count;
  uint64_t left = p->input->spare_slots, passes = 0;
  for (uint32_t c = 0; p->input->chunk_has_slot != NULL && c < p->input->chunk_count; c++)
    left += plan->stays[c] && p->input->chunk_has_slot[c] && is_state(p->input, c);
  const bool results = p->host != HOST_ONE && p->host != HOST_PASSES;
  uint32_t most = p->host == HOST_ONE ? 0 : pieces;
  if (p->host == HOST_MOST || p->host == HOST_HALF) {
    most = 0;
    for (uint32_t i = 0; i < pieces; i++) most += !plan->piece_on_device[i];
    most = (uint32_t)((uint64_t)most * (p->host == HOST_MOST ? 3 : 2) / 4);
  }
  for (uint32_t i = 0; i < pieces && most > 0; i++) {
    const uint32_t piece = p->facts.pieces_by_gap[i], slots = p->input->pieces[piece].pass_slots;
    if (p->input->pieces[piece].result_ns == 0 || plan->piece_on_device[piece] || slots > left) continue;
    most--;
    left -= slots;
    passes += slots;
    plan->piece_passes[piece] = 1;
    if (results && p->facts.can_ahead[piece]) plan->piece_ahead[piece] = GMI_AHEAD_RESULTS;
  }
  if ((results && p->host != HOST_BOTH) || (p->host == HOST_PASSES && left < passes)) return;
  for (uint32_t i = 0; i < pieces; i++) {
    const uint32_t piece = p->facts.pieces_by_gap[p->host == HOST_BOTH ? pieces - 1 - i : i];
    uint32_t slots = p->input->pieces[piece].ahead_slots;
    if (plan->piece_passes[piece]) /* they serve both */
      slots -= p->input->pieces[piece].pass_slots < slots ? p->input->pieces[piece].pass_slots : slots;
    if (!p->facts.can_ahead[piece] || plan->piece_on_device[piece] || slots > left) continue;
    left -= slots;
    plan->piece_ahead[piece] = GMI_AHEAD_ALL;
  }
}

/* Makes p->plan from the decisions in hits, and simulates it. */
static gemini_status_t make_moves(planner_t *p, const gmi_model_t *model, const gmi_hits_t *hits) {
  gmi_plan_free(&p->plan);
  gemini_status_t status = gmi_schedule_make(model, hits, &p->plan);
  if (status == GEMINI_OK) choose_host(p, &p->plan);
  if (status == GEMINI_OK) status = gmi_simulate(&p->facts, &p->plan, NULL);
  p->plan.optimum_count = p->bound;
  spend(p, SIMULATE_VISITS * (model_visits(model) + hits->fetch_count));
  return status;
}

/* Total order of candidates: predicted time, then fewer device pieces, fewer copies, fewer frames held back, fewer
 * pieces whose states stay. Being total, it does not depend on the order of trials. */
static bool is_better(const candidate_t *a, const candidate_t *b) {
  if (b->device_count == NONE) return true;
  if (a->predicted_ns != b->predicted_ns) return a->predicted_ns < b->predicted_ns;
  if (a->device_count != b->device_count) return a->device_count < b->device_count;
  if (a->copies != b->copies) return a->copies < b->copies;
  if (a->reduce != b->reduce) return a->reduce < b->reduce;
  if (a->ring != b->ring) return a->ring < b->ring;
  if (a->hold != b->hold) return a->hold < b->hold;
  return a->host < b->host;
}

/* Notes the candidate whose plan has just been made. */
static void note_candidate(planner_t *p, uint32_t device_count, uint32_t reduce, uint32_t ring, uint32_t hold) {
  const uint64_t copies = p->plan.fetch_count + p->plan.evict_dirty_count;
  p->at = (candidate_t){ device_count, reduce, ring, hold, p->host, p->plan.predicted_ns, copies };
  if (is_better(&p->at, &p->best)) p->best = p->at;
}

/* Traffic beyond 1.05 times the lower bound is worth neither an earlier start of fetches nor states that stay. */
static bool fetches_too_much(const planner_t *p, const gmi_hits_t *hits) {
  return hits->fetch_count * 20 > p->bound * 21;
}

/* Plans and simulates one candidate, and updates best. If reduce or hold makes it fetch too much, the candidate is
 * dropped and *kept_out is false. */
static gemini_status_t try_candidate(planner_t *p, uint32_t device_count, uint32_t reduce, uint32_t hold,
                                     bool *kept_out) {
  *kept_out = false;
  gemini_status_t status = use_model(p, device_count, hold);
  if (status != GEMINI_OK) return status;
  gmi_hits_t hits = { 0 };
  if (reduce > 0) {
    status = gmi_min_make(&p->model, reduce, &hits);
    spend(p, hits.visits);
    if (status != GEMINI_OK) return status;
  }
  if ((reduce > 0 || hold > 0) && fetches_too_much(p, reduce > 0 ? &hits : &p->optimum)) {
    gmi_hits_free(&hits);
    return GEMINI_OK;
  }
  p->candidates++;
  status = make_moves(p, &p->model, reduce > 0 ? &hits : &p->optimum);
  gmi_hits_free(&hits);
  if (status != GEMINI_OK) return status;
  note_candidate(p, device_count, reduce, 0, hold);
  *kept_out = true;
  return GEMINI_OK;
}

/* As try_candidate(), with what stays on the device spread evenly. */
typedef enum { SPREAD_TRIED, SPREAD_IMPOSSIBLE, SPREAD_FETCHES_TOO_MUCH } spread_t;
static gemini_status_t try_spread(planner_t *p, uint32_t ring, spread_t *outcome) {
  gmi_hits_t hits = { 0 };
  bool fits = false;
  gemini_status_t status = use_model(p, 0, 0);
  if (status == GEMINI_OK) status = gmi_spread_make(&p->model, ring, &hits, &fits);
  spend(p, hits.visits);
  *outcome = !fits ? SPREAD_IMPOSSIBLE : fetches_too_much(p, &hits) ? SPREAD_FETCHES_TOO_MUCH : SPREAD_TRIED;
  if (status == GEMINI_OK && *outcome == SPREAD_TRIED) {
    p->candidates++;
    status = make_moves(p, &p->model, &hits);
    if (status == GEMINI_OK) note_candidate(p, 0, 0, ring, 0);
  }
  gmi_hits_free(&hits);
  return status;
}

/* Returns whether another candidate may be tried with reserve visits left afterwards. */
static bool may_go_on(const planner_t *p, uint64_t reserve) {
  /* A candidate costs about two runs of MIN, a schedule and a simulation. */
  return p->candidates < MAX_CANDIDATES && p->work > reserve + (8 + SIMULATE_VISITS) * model_visits(&p->model);
}

/* Tries reductions 0, 1, 2, 4, ... with device_count pieces on the device. Stops at the first one that fetches too
 * much (try_candidate()), after three in a row that are no faster, or if nothing is fetched. */
static gemini_status_t try_reductions(planner_t *p, uint32_t device_count, uint32_t hold, uint64_t reserve) {
  uint64_t least_ns = UINT64_MAX;
  uint32_t worse = 0;
  for (uint32_t reduce = 0; reduce == 0 || (reduce < p->input->frame_count && worse < 3 && may_go_on(p, reserve));
       reduce = reduce > 0 ? 2 * reduce : 1) {
    bool kept;
    gemini_status_t status = try_candidate(p, device_count, reduce, hold, &kept);
    if (status != GEMINI_OK) return status;
    if (!kept || p->plan.fetch_count == 0 || reduce >= UINT32_C(1) << 30) break;
    worse = p->plan.predicted_ns < least_ns ? 0 : worse + 1;
    if (p->plan.predicted_ns < least_ns) least_ns = p->plan.predicted_ns;
  }
  return GEMINI_OK;
}

/* Tries to spread what stays evenly, with rings of more and more frames. With more frames, fetches start earlier, and
 * there are more of them; ends after three rings with which these are too many, or the link alone takes longer than the
 * best candidate. */
static gemini_status_t try_spreads(planner_t *p) {
  uint32_t slow = 0;
  for (uint32_t ring = 1; ring < p->input->frame_count && slow < 3; ring += 1 + ring / 6) {
    spread_t outcome;
    if (!may_go_on(p, SPREAD_PASSES * model_visits(&p->model))) break;
    gemini_status_t status = try_spread(p, ring, &outcome);
    if (status != GEMINI_OK) return status;
    const bool is_slow =
        outcome == SPREAD_FETCHES_TOO_MUCH || (outcome == SPREAD_TRIED && p->plan.fetch_busy_ns > p->best.predicted_ns);
    if (outcome != SPREAD_IMPOSSIBLE) slow = is_slow ? slow + 1 : 0;
  }
  return GEMINI_OK;
}

/* Returns the largest number of pieces of the order whose state chunks can stay on the device beside every stage.
 * More pieces need more frames, so bisection finds it. */
static uint32_t count_that_fits(planner_t *p) {
  const gmi_plan_input_t *input = p->input;
  uint8_t *held = p->held; /* used as scratch: state chunks are marked with 2, then unmarked */
  uint32_t low = 0, high = p->order_count;
  while (low < high) {
    uint32_t middle = low + (high - low + 1) / 2;
    memset(p->on_device, 0, input->piece_count);
    for (uint32_t i = 0; i < middle; i++) {
      p->on_device[p->order[i]] = 1;
      hold_states(p, p->order[i]);
    }
    if (stages_fit(input, held, p->on_device, NULL)) low = middle;
    else high = middle - 1;
    for (uint32_t c = 0; c < input->chunk_count; c++) held[c] = held[c] == 1;
    spend(p, (uint64_t)input->ops[input->op_count].access_first + 2 * input->chunk_count);
  }
  p->model_count = NONE; /* on_device no longer matches the model */
  return low;
}

/* The least number of pieces on the device, at most `most`, with whose states there the host and files have room for
 * all other chunks, and for those of a piece that come while others have yet to leave. */
static uint32_t count_that_must(planner_t *p, uint32_t most) {
  const gmi_plan_input_t *input = p->input;
  const uint32_t largest = gmi_plan_largest_piece(input);
  uint32_t count = 0;
  if (!input->home_slots) return 0;
  for (;; hold_states(p, p->order[count++])) {
    uint64_t left = largest;
    for (uint32_t c = 0; c < input->chunk_count; c++) left += p->held[c] != 2;
    if (left <= input->home_slots || count == most) break;
  }
  for (uint32_t c = 0; c < input->chunk_count; c++) p->held[c] = p->held[c] == 1;
  p->model_count = NONE; /* held no longer matches the model */
  return count;
}

/* Fills order with the pieces that fit on the device at all, those whose chunks are needed again soonest first: on
 * the host their write-back, update and fetch have the least time to hide. */
static void find_order(planner_t *p) {
  const gmi_plan_input_t *input = p->input;
  uint64_t held = 0;
  for (uint32_t c = 0; c < input->chunk_count; c++) held += p->held[c];
  for (uint32_t i = 0; i < input->piece_count; i++) {
    uint32_t piece = p->facts.pieces_by_gap[i];
    uint64_t need = held + piece_need(input, p->held, piece) + input->ops[input->pieces[piece].after_op].heap_frames;
    if (need <= input->frame_count) p->order[p->order_count++] = piece;
  }
}

static int compare_count(const void *a, const void *b) {
  const uint32_t *x = a, *y = b;
  return *x < *y ? -1 : *x > *y;
}

/* AUTO: where all chunks fit on the device for good, beside every op, they stay there and all pieces run there: nothing
 * ever moves. This comes before predicted time, which counts neither what a move costs the calling thread nor the
 * memory traffic of host pieces, and would hide these behind the ops. *done_out: whether that is the plan.
 */
static gemini_status_t plan_all(planner_t *p, bool *done_out) {
  const gmi_plan_input_t *input = p->input;
  *done_out = false;
  if (input->piece_count == 0 || p->order_count < input->piece_count || count_that_fits(p) < input->piece_count)
    return GEMINI_OK;
  bool kept;
  gemini_status_t status = try_candidate(p, input->piece_count, 0, 0, &kept);
  *done_out = status == GEMINI_OK && p->plan.fetch_count == 0 && p->plan.evict_first[input->op_count] == 0;
  return status;
}

/* Tries the best candidate with the states of quarters of its pieces held, and quarters of fits pieces with those of
 * all of them held. */
static gemini_status_t try_holds(planner_t *p, uint32_t fits) {
  const uint32_t reduce = p->best.reduce, best = p->best.device_count;
  gemini_status_t status = GEMINI_OK;
  for (uint32_t i = 0; i < 8 && status == GEMINI_OK && may_go_on(p, 0); i++) {
    const bool all = i % 2;
    const uint32_t part = (uint32_t)((uint64_t)(all ? fits : best) * (4 - i / 2) / 4);
    const uint32_t hold = part < fits ? part : fits, count = all ? hold : best;
    bool kept;
    if (hold == 0) continue;
    mark(p, count, hold);
    p->model_count = NONE; /* what is marked no longer matches the model */
    if (!stages_fit(p->input, p->held, p->on_device, NULL)) continue;
    status = try_candidate(p, count, reduce, hold, &kept);
    if (status == GEMINI_OK && !kept) status = try_candidate(p, count, 0, hold, &kept);
  }
  return status;
}

/* The counts of pieces on the device that have been tried, or bound those that are. */
typedef struct tried {
  uint32_t counts[MAX_CANDIDATES + 8], count;
} tried_t;

/* Tries halfway between the best count and its neighbours, until they are adjacent or no more than spare is left of the
 * work. */
static gemini_status_t try_halves(planner_t *p, tried_t *tried, uint32_t reduce, uint64_t spare) {
  gemini_status_t status = GEMINI_OK;
  for (bool refined = true; refined && status == GEMINI_OK;) {
    refined = false;
    qsort(tried->counts, tried->count, sizeof *tried->counts, compare_count);
    uint32_t best = 0, halves[2], half_count = 0;
    for (uint32_t j = 0; j < tried->count; j++)
      if (tried->counts[j] == p->best.device_count) best = j;
    const uint32_t *at = &tried->counts[best];
    if (best > 0 && at[0] - at[-1] > 1) halves[half_count++] = at[-1] + (at[0] - at[-1]) / 2;
    if (best + 1 < tried->count && at[1] - at[0] > 1) halves[half_count++] = at[0] + (at[1] - at[0]) / 2;
    for (uint32_t h = 0; h < half_count && status == GEMINI_OK && may_go_on(p, spare) && tried->count < MAX_CANDIDATES;
         h++) {
      bool kept;
      status = try_candidate(p, halves[h], reduce, 0, &kept);
      if (status == GEMINI_OK && !kept) status = try_candidate(p, halves[h], 0, 0, &kept);
      tried->counts[tried->count++] = halves[h];
      refined = true;
    }
  }
  return status;
}

/* Tries the best candidate with host pieces in two passes, and where first passes can be computed ahead, other counts
 * from least to most with that. Passes have to gain a 32nd: what they read twice is traffic of the host's memory that
 * no model knows. */
static gemini_status_t try_passes(planner_t *p, uint32_t least, uint32_t most) {
  bool kept, can = false, can_ahead = false;
  for (uint32_t i = 0; i < p->input->piece_count; i++) {
    can |= p->input->pieces[i].result_ns > 0;
    can_ahead |= p->input->pieces[i].result_ns > 0 && p->facts.can_ahead[i];
  }
  const candidate_t one = p->best;
  gemini_status_t status = GEMINI_OK;
  for (p->host = HOST_PASSES; can && p->host <= HOST_BOTH && status == GEMINI_OK && may_go_on(p, 0); p->host++) {
    candidate_t before = p->best;
    if (p->host != HOST_PASSES && !can_ahead) break;
    if (p->host == HOST_RESULTS) p->best.device_count = NONE;
    status = try_candidate(p, before.device_count, before.reduce, before.hold, &kept);
    if (p->host != HOST_RESULTS || status != GEMINI_OK) continue;
    tried_t tried = { { least, before.device_count, most }, 3 };
    if (p->best.device_count != NONE) status = try_halves(p, &tried, before.reduce, WORK_LIMIT / 5);
    if (is_better(&before, &p->best)) p->best = before;
  }
  if (p->best.predicted_ns + one.predicted_ns / 32 >= one.predicted_ns) p->best = one;
  p->host = p->best.host;
  return status;
}

/* AUTO: searches the number of device pieces with the shortest predicted time. fits is the number of pieces whose
 * states can stay on the device for good.
 * 1. Tries 0, with all reductions; if host and files are short of room, the least number that leaves them enough.
 * 2. Tries fits, quarters of it, all, and halfway between fits and all. With more than fits pieces on the device some
 *    states come and go. If the host is short of room, all is fits.
 * 3. Tries halfway between the best count and its neighbours (try_halves()).
 * 4. Unless the host is short of room, tries two passes (try_passes()), and to have states stay (try_holds()).
 * 5. Tries all reductions with the best count. */
static gemini_status_t plan_auto(planner_t *p) {
  bool done;
  gemini_status_t status = plan_all(p, &done);
  if (status != GEMINI_OK || done) return status;
  uint32_t fits = count_that_fits(p), all = p->files ? fits : p->order_count;
  const uint32_t least = count_that_must(p, fits), over = fits - least;
  const uint32_t grid[] = {
    fits, least + over / 2, all, least + over / 4, least + (uint32_t)(((uint64_t)over * 3) / 4), fits + (all - fits) / 2
  };
  status = try_reductions(p, least, 0, WORK_LIMIT / 4 * 3);
  uint32_t reduce = p->best.reduce; /* a reduction that suits no device pieces is a reasonable start with some */
  tried_t tried = { { least }, 1 };
  for (uint32_t i = 0; i < sizeof grid / sizeof *grid && status == GEMINI_OK && may_go_on(p, 0); i++) {
    bool known = false, kept;
    for (uint32_t j = 0; j < tried.count; j++) known = known || tried.counts[j] == grid[i];
    if (known) continue;
    status = try_candidate(p, grid[i], reduce, 0, &kept);
    if (status == GEMINI_OK && !kept) status = try_candidate(p, grid[i], 0, 0, &kept);
    tried.counts[tried.count++] = grid[i];
  }
  if (status == GEMINI_OK) status = try_halves(p, &tried, reduce, WORK_LIMIT / 5 * 2);
  if (status == GEMINI_OK && !p->files) status = try_passes(p, least, all);
  if (status == GEMINI_OK && !p->files && p->input->home_slots == 0) status = try_holds(p, fits);
  if (status == GEMINI_OK && p->best.device_count != 0 && may_go_on(p, 0))
    status = try_reductions(p, p->best.device_count, p->best.hold, 0);
  return status;
}

/* CPU, and STATIC with its sticky chunks: the only candidate follows the rule of gmi_visit_make(). held may differ
 * from p->held; then it needs a model of its own. */
static gemini_status_t plan_visit(planner_t *p, uint32_t device_count, const uint8_t *sticky, const uint8_t *held) {
  gemini_status_t status = use_model(p, device_count, 0);
  if (status != GEMINI_OK) return status;
  gmi_model_t model = { 0 };
  gmi_hits_t hits = { 0 };
  if (held != p->held) status = gmi_model_make(&p->facts, p->on_device, held, &model);
  if (status == GEMINI_OK) status = gmi_visit_make(held != p->held ? &model : &p->model, sticky, &hits);
  if (status == GEMINI_OK) status = make_moves(p, held != p->held ? &model : &p->model, &hits);
  p->best.device_count = NONE;
  note_candidate(p, device_count, 0, 0, 0);
  gmi_hits_free(&hits);
  gmi_model_free(&model);
  return status;
}

static bool is_param(const gmi_plan_input_t *input, uint32_t chunk) {
  return input->chunk_kind[chunk] == GEMINI_KIND_PARAM || input->chunk_kind[chunk] == GEMINI_KIND_GRAD;
}

/* The number that a fraction of total stands for, rounded up: a fraction above 0 gives at least 1. */
static uint64_t fraction_of(uint64_t total, double fraction) {
  double wanted = (double)total * fraction;
  uint64_t count = (uint64_t)wanted;
  if ((double)count < wanted) count++;
  return count < total ? count : total;
}

/* STATIC: parameters and gradients in order of index, up to static_param_fraction, and the states of pieces in order
 * of index, up to static_optim_fraction, stay on the device. fixed: 1, the chunk stays for good; 2, it stays except
 * for the updates of its host pieces. */
static gemini_status_t plan_static(planner_t *p, gmi_plan_failure_t *failure_out) {
  const gmi_plan_input_t *input = p->input;
  uint8_t *fixed = calloc((size_t)input->chunk_count + 1, 1), *held = calloc((size_t)input->chunk_count + 1, 1);
  gemini_status_t status = GEMINI_ERR_OOM_SYSTEM;
  if (fixed == NULL || held == NULL) goto end;
  uint64_t params = 0, states = 0, placed = 0;
  for (uint32_t c = 0; c < input->chunk_count; c++) params += is_param(input, c);
  params = fraction_of(params, input->static_param_fraction);
  for (uint32_t c = 0; c < input->chunk_count && params > 0; c++)
    if (is_param(input, c)) fixed[c] = 1, params--;

  /* Pieces in order of index run on the device until their states make up the fraction. A state chunk of several
   * pieces counts once. */
  p->stamp_now++;
  for (uint32_t piece = 0; piece < input->piece_count; piece++) {
    for (uint32_t i = input->pieces[piece].chunk_first + input->pieces[piece].shared_count;
         i < gmi_plan_piece_end(input, piece); i++) {
      if (p->stamp[input->piece_chunks[i]] != p->stamp_now) states++;
      p->stamp[input->piece_chunks[i]] = p->stamp_now;
    }
  }
  states = fraction_of(states, input->static_optim_fraction);
  p->stamp_now++;
  p->order_count = 0;
  for (uint32_t piece = 0; piece < input->piece_count && placed < states; piece++) {
    p->order[p->order_count++] = piece;
    for (uint32_t i = input->pieces[piece].chunk_first + input->pieces[piece].shared_count;
         i < gmi_plan_piece_end(input, piece); i++) {
      if (p->stamp[input->piece_chunks[i]] != p->stamp_now) placed++;
      p->stamp[input->piece_chunks[i]] = p->stamp_now;
      fixed[input->piece_chunks[i]] = 1;
    }
  }
  memset(p->on_device, 0, input->piece_count);
  for (uint32_t i = 0; i < p->order_count; i++) p->on_device[p->order[i]] = 1;
  for (uint32_t c = 0; c < input->chunk_count; c++) held[c] = fixed[c] != 0 || p->held[c];
  status = GEMINI_ERR_OOM_DEVICE;
  if (!stages_fit(input, held, p->on_device, failure_out)) goto end;
  for (uint32_t piece = 0; piece < input->piece_count; piece++) {
    for (uint32_t i = input->pieces[piece].chunk_first; !p->on_device[piece] && i < gmi_plan_piece_end(input, piece);
         i++)
      if (fixed[input->piece_chunks[i]]) fixed[input->piece_chunks[i]] = 2;
  }
  for (uint32_t c = 0; c < input->chunk_count; c++) held[c] = fixed[c] == 1 || p->held[c];
  status = plan_visit(p, p->order_count, fixed, held);
end:
  free(fixed);
  free(held);
  return status;
}

/* Fills plan->next_use by walking the ops backwards twice, like link_accesses() of model.c, but for all accesses of
 * ops, including those of held chunks. The first round only establishes what the next iteration accesses first. */
static gemini_status_t find_next_use(planner_t *p) {
  const gmi_plan_input_t *input = p->input;
  const gmi_facts_t *facts = &p->facts;
  gmi_plan_t *plan = &p->plan;
  mark(p, p->at.device_count, p->at.hold); /* the model may be another candidate's */
  plan->next_use = malloc((size_t)input->ops[input->op_count].access_first * sizeof(uint32_t) + 1);
  if (plan->next_use == NULL) return GEMINI_ERR_OOM_SYSTEM;
  uint32_t *ahead = p->stamp;
  memset(ahead, 0xff, input->chunk_count * sizeof *ahead);
  for (uint32_t round = 0; round < 2; round++) {
    uint32_t base = round == 0 ? input->op_count : 0;
    for (uint32_t op = input->op_count; op-- > 0;) {
      for (uint32_t i = facts->op_piece_first[op]; i < facts->op_piece_first[op + 1]; i++) {
        uint32_t piece = facts->op_pieces[i];
        for (uint32_t j = input->pieces[piece].chunk_first; j < gmi_plan_piece_end(input, piece); j++)
          if (!plan->piece_on_device[piece] && !p->held[input->piece_chunks[j]])
            ahead[input->piece_chunks[j]] = UINT32_MAX;
      }
      /* Device pieces run before the op's host pieces take their chunks, so the backward walk meets the host pieces
       * first. */
      for (uint32_t i = facts->op_piece_first[op]; i < facts->op_piece_first[op + 1]; i++) {
        uint32_t piece = facts->op_pieces[i];
        for (uint32_t j = input->pieces[piece].chunk_first; j < gmi_plan_piece_end(input, piece); j++)
          if (plan->piece_on_device[piece]) ahead[input->piece_chunks[j]] = op + base;
      }
      for (uint32_t x = input->ops[op].access_first; x < input->ops[op + 1].access_first; x++) {
        if (round == 1) plan->next_use[x] = ahead[input->accesses[x].chunk];
        ahead[input->accesses[x].chunk] = op + base;
      }
    }
  }
  return GEMINI_OK;
}

gemini_status_t gmi_plan_make(const gmi_plan_input_t *input, gmi_plan_t *plan_out, gmi_plan_failure_t *failure_out) {
  gemini_status_t status = check_input(input);
  if (status != GEMINI_OK) return status;
  planner_t p = { .input = input, .model_count = NONE, .work = WORK_LIMIT };
  p.best.device_count = p.at.device_count = p.bound_count = NONE;
  p.stamp = calloc((size_t)input->chunk_count + 1, sizeof *p.stamp);
  p.held = calloc((size_t)input->chunk_count + 1, 1);
  p.on_device = calloc((size_t)input->piece_count + 1, 1);
  p.order = malloc((size_t)input->piece_count * sizeof *p.order + 1);
  status = GEMINI_ERR_OOM_SYSTEM;
  if (p.stamp == NULL || p.held == NULL || p.on_device == NULL || p.order == NULL) goto end;
  p.files = input->piece_count > 0 && host_is_short(input, p.held);
  for (uint32_t c = 0; c < input->chunk_count; c++)
    p.held[c] = input->chunk_pinned != NULL && input->chunk_pinned[c] != 0;
  status = GEMINI_ERR_OOM_DEVICE;
  if (!stages_fit(input, p.held, NULL, failure_out)) goto end;
  status = gmi_facts_make(input, &p.facts);
  if (status != GEMINI_OK) goto end;

  if (input->placement == GEMINI_PLACEMENT_STATIC) {
    status = plan_static(&p, failure_out);
  } else if (input->placement == GEMINI_PLACEMENT_CPU) {
    status = plan_visit(&p, 0, NULL, p.held);
  } else {
    find_order(&p);
    if (input->placement == GEMINI_PLACEMENT_CUDA) status = try_reductions(&p, count_that_fits(&p), 0, 0);
    else status = plan_auto(&p);
    if (status == GEMINI_OK && input->piece_count == 0 && p.best.predicted_ns > p.plan.compute_ns)
      status = try_spreads(&p);
  }
  if (status == GEMINI_OK && (p.at.device_count != p.best.device_count || p.at.reduce != p.best.reduce ||
                              p.at.ring != p.best.ring || p.at.hold != p.best.hold || p.at.host != p.best.host)) {
    /* The last candidate is not the best: make the best again. Keeping one plan at a time bounds memory. */
    bool kept;
    spread_t outcome;
    p.host = p.best.host;
    status = p.best.ring > 0 ? try_spread(&p, p.best.ring, &outcome)
                             : try_candidate(&p, p.best.device_count, p.best.reduce, p.best.hold, &kept);
  }
  if (status == GEMINI_OK) status = find_next_use(&p);
  p.plan.piece_use = p.facts.piece_use;
  p.facts.piece_use = NULL;
end:
  drop_model(&p);
  gmi_facts_free(&p.facts);
  free(p.stamp);
  free(p.held);
  free(p.on_device);
  free(p.order);
  if (status == GEMINI_OK) *plan_out = p.plan;
  else gmi_plan_free(&p.plan);
  return status;
}

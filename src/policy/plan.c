/* Chooses where pieces run and how early chunks move, and makes the plan.
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "policy/model.h"

/* Visits of accesses, steps and moves that all candidates together may cost: planning must end within a second on one
 * core for 300,000 accesses. No clock, so that the same input gives the same plan. */
#define WORK_LIMIT UINT64_C(40000000)
#define SIMULATE_VISITS 5 /* a candidate's schedule and simulation, in units of its accesses and moves */
#define MAX_CANDIDATES 64
#define TIME_LIMIT_NS (UINT64_C(1) << 59)

typedef struct candidate {
  uint32_t device_count; /* pieces of the order of preference that run on the device */
  uint32_t reduce;       /* frames that MIN goes without, so that fetches can start earlier */
  uint64_t predicted_ns, fetch_count;
} candidate_t;

typedef struct planner {
  const gmi_plan_input_t *input;
  gmi_facts_t facts;
  uint32_t *order;                   /* [order_count] pieces that may run on the device, in order of preference */
  uint32_t order_count, model_count; /* model_count: pieces on the device in model; NONE: there is no model */
  uint8_t *held;                     /* [chunk_count] 1: pinned; 2: state of a piece on the device, which stays */
  bool files;         /* the host has no room for all states: those of device pieces stay on the device */
  uint8_t *on_device; /* [piece_count] */
  uint32_t *stamp;    /* [chunk_count] scratch: counts chunks once */
  uint32_t stamp_now, candidates;
  gmi_model_t model;
  gmi_hits_t optimum;   /* of model, with all frames */
  uint64_t work;        /* left */
  gmi_plan_t plan;      /* the last candidate's */
  candidate_t at, best; /* of plan; the best so far, device_count NONE when there is none */
} planner_t;
#define NONE UINT32_MAX

void gmi_plan_free(gmi_plan_t *plan) {
  if (plan == NULL) return;
  free(plan->fetches);
  free(plan->fetch_first);
  free(plan->evicts);
  free(plan->evict_first);
  free(plan->piece_on_device);
  free(plan->resident_at_start);
  free(plan->stays);
  free(plan->next_use);
  free(plan->piece_use);
  memset(plan, 0, sizeof *plan);
}

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
         input->placement <= GEMINI_PLACEMENT_STATIC && input->static_param_fraction >= 0 &&
         input->static_param_fraction <= 1 && input->static_optim_fraction >= 0 && input->static_optim_fraction <= 1;
}

/* seen: [chunk_count] zeroed; used to find a chunk twice in a piece. */
static bool input_is_valid(const gmi_plan_input_t *input, uint32_t *seen) {
  uint32_t accesses = input->ops[input->op_count].access_first;
  uint64_t total_ns = 0, piece_chunks = 0;
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
    if (piece->chunk_first > gmi_plan_piece_end(input, p)) return false;
    if (piece->shared_count > gmi_plan_piece_end(input, p) - piece->chunk_first) return false;
    if (!add_time(&total_ns, 1, piece->host_ns) || !add_time(&total_ns, 1, piece->device_ns)) return false;
    for (uint32_t i = piece->chunk_first; i < gmi_plan_piece_end(input, p); i++) {
      if (input->piece_chunks[i] >= input->chunk_count || seen[input->piece_chunks[i]] == p + 1) return false;
      seen[input->piece_chunks[i]] = p + 1;
    }
    piece_chunks += gmi_plan_piece_end(input, p) - piece->chunk_first;
  }
  /* Indices of accesses, pieces' included, need a bit for a mark. */
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

/* Frames that a step needs beside held chunks: those of its chunks that are not held. */
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

/* Does every op, and every piece marked on_device (NULL: none), fit beside the held chunks? Fills failure_out (may be
 * NULL) with the first op that does not. */
static bool steps_fit(const gmi_plan_input_t *input, const uint8_t *held, const uint8_t *on_device,
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

static uint64_t model_visits(const gmi_model_t *model) { return (uint64_t)model->access_count + model->step_count; }

static void spend(planner_t *p, uint64_t visits) { p->work -= visits < p->work ? visits : p->work; }

static void hold_states(planner_t *p, uint32_t piece) {
  const gmi_plan_piece_t *at = &p->input->pieces[piece];
  for (uint32_t i = at->chunk_first + at->shared_count; i < gmi_plan_piece_end(p->input, piece); i++)
    if (!p->held[p->input->piece_chunks[i]]) p->held[p->input->piece_chunks[i]] = 2;
}

/* Would all states and what is shared with ops find room on the host? */
static bool host_is_short(const gmi_plan_input_t *input, uint8_t *seen) {
  uint64_t chunks = 0;
  for (uint32_t i = 0; i < input->pieces[input->piece_count].chunk_first; i++) {
    chunks += !seen[input->piece_chunks[i]];
    seen[input->piece_chunks[i]] = 1;
  }
  memset(seen, 0, input->chunk_count);
  return input->host_slots > 0 && chunks > input->host_slots;
}

/* The model, and MIN with all frames, with the first device_count pieces of the order on the device. */
static gemini_status_t use_model(planner_t *p, uint32_t device_count) {
  if (p->model_count == device_count) return GEMINI_OK;
  drop_model(p);
  memset(p->on_device, 0, p->input->piece_count);
  for (uint32_t i = 0; i < device_count; i++) p->on_device[p->order[i]] = 1;
  if (p->files) {
    for (uint32_t c = 0; c < p->input->chunk_count; c++) p->held[c] = p->held[c] == 1;
    for (uint32_t i = 0; i < device_count; i++) hold_states(p, p->order[i]);
  }
  gemini_status_t status = gmi_model_make(&p->facts, p->on_device, p->held, &p->model);
  if (status != GEMINI_OK) return status;
  spend(p, 3 * model_visits(&p->model));
  status = gmi_min_make(&p->model, 0, &p->optimum);
  spend(p, p->optimum.visits);
  if (status != GEMINI_OK) {
    gmi_model_free(&p->model);
    return status;
  }
  p->model_count = device_count;
  return GEMINI_OK;
}

/* Makes p->plan of the decisions hits, and simulates it. */
static gemini_status_t make_moves(planner_t *p, const gmi_model_t *model, const gmi_hits_t *hits) {
  gmi_plan_free(&p->plan);
  gemini_status_t status = gmi_schedule_make(model, hits, &p->plan);
  if (status == GEMINI_OK) status = gmi_simulate(&p->facts, &p->plan, NULL);
  p->plan.optimum_count = p->optimum.bound_count;
  spend(p, SIMULATE_VISITS * (model_visits(model) + hits->fetch_count));
  return status;
}

static bool is_better(const candidate_t *a, const candidate_t *b) {
  if (b->device_count == NONE) return true;
  if (a->predicted_ns != b->predicted_ns) return a->predicted_ns < b->predicted_ns;
  if (a->device_count != b->device_count) return a->device_count < b->device_count;
  if (a->fetch_count != b->fetch_count) return a->fetch_count < b->fetch_count;
  return a->reduce < b->reduce;
}

/* Makes and weighs one candidate. It stays out of the choice, with *kept_out false, when it fetches more than 1.05
 * times what it must. */
static gemini_status_t try_candidate(planner_t *p, uint32_t device_count, uint32_t reduce, bool *kept_out) {
  *kept_out = false;
  gemini_status_t status = use_model(p, device_count);
  if (status != GEMINI_OK) return status;
  gmi_hits_t hits = { 0 };
  if (reduce > 0) {
    status = gmi_min_make(&p->model, reduce, &hits);
    spend(p, hits.visits);
    if (status != GEMINI_OK) return status;
    if (hits.fetch_count * 20 > p->optimum.bound_count * 21) {
      gmi_hits_free(&hits);
      return GEMINI_OK;
    }
  }
  p->candidates++;
  status = make_moves(p, &p->model, reduce > 0 ? &hits : &p->optimum);
  gmi_hits_free(&hits);
  if (status != GEMINI_OK) return status;
  p->at = (candidate_t){ device_count, reduce, p->plan.predicted_ns, p->plan.fetch_count };
  if (is_better(&p->at, &p->best)) p->best = p->at;
  *kept_out = true;
  return GEMINI_OK;
}

/* May another candidate be tried, so that reserve is left? */
static bool may_go_on(const planner_t *p, uint64_t reserve) {
  /* A candidate costs about two runs of MIN, a schedule and a simulation. */
  return p->candidates < MAX_CANDIDATES && p->work > reserve + (8 + SIMULATE_VISITS) * model_visits(&p->model);
}

/* Tries reductions 0, 1, 2, 4, ... with device_count pieces on the device; goes on while the plan may fetch that much,
 * until three in a row are no better. */
static gemini_status_t try_reductions(planner_t *p, uint32_t device_count, uint64_t reserve) {
  uint64_t least_ns = UINT64_MAX;
  uint32_t worse = 0;
  for (uint32_t reduce = 0; reduce == 0 || (reduce < p->input->frame_count && worse < 3 && may_go_on(p, reserve));
       reduce = reduce > 0 ? 2 * reduce : 1) {
    bool kept;
    gemini_status_t status = try_candidate(p, device_count, reduce, &kept);
    if (status != GEMINI_OK) return status;
    if (!kept || p->plan.fetch_count == 0 || reduce >= UINT32_C(1) << 30) break;
    worse = p->plan.predicted_ns < least_ns ? 0 : worse + 1;
    if (p->plan.predicted_ns < least_ns) least_ns = p->plan.predicted_ns;
  }
  return GEMINI_OK;
}

/* The most pieces of the order whose state chunks can stay on the device beside every step. */
static uint32_t count_that_fits(planner_t *p) {
  const gmi_plan_input_t *input = p->input;
  uint8_t *held = p->held; /* lent: state chunks are marked with 2 and unmarked again */
  uint32_t low = 0, high = p->order_count;
  while (low < high) {
    uint32_t middle = low + (high - low + 1) / 2;
    memset(p->on_device, 0, input->piece_count);
    for (uint32_t i = 0; i < middle; i++) {
      p->on_device[p->order[i]] = 1;
      hold_states(p, p->order[i]);
    }
    if (steps_fit(input, held, p->on_device, NULL)) low = middle;
    else high = middle - 1;
    for (uint32_t c = 0; c < input->chunk_count; c++) held[c] = held[c] == 1;
    spend(p, (uint64_t)input->ops[input->op_count].access_first + 2 * input->chunk_count);
  }
  p->model_count = NONE; /* on_device was used */
  return low;
}

/* Pieces that fit on the device at all, those that are needed again soonest first. */
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

/* AUTO. Counts tried: none, quarters of those whose states fit for good, halfway to all and all (whose states then come
 * and go); then halfway between the best and its neighbours; then the best one's reductions. */
static gemini_status_t plan_auto(planner_t *p) {
  uint32_t fits = count_that_fits(p), all = p->files ? fits : p->order_count, count = 0, tried[MAX_CANDIDATES + 8];
  const uint32_t grid[] = {
    fits, fits / 2, all, fits / 4, (uint32_t)(((uint64_t)fits * 3) / 4), fits + (all - fits) / 2
  };
  gemini_status_t status = try_reductions(p, 0, WORK_LIMIT / 4 * 3);
  uint32_t reduce = p->best.reduce; /* what is good without pieces is a fair start with some */
  tried[count++] = 0;
  for (uint32_t i = 0; i < sizeof grid / sizeof *grid && status == GEMINI_OK && may_go_on(p, 0); i++) {
    bool known = false, kept;
    for (uint32_t j = 0; j < count; j++) known = known || tried[j] == grid[i];
    if (known) continue;
    status = try_candidate(p, grid[i], reduce, &kept);
    if (status == GEMINI_OK && !kept) status = try_candidate(p, grid[i], 0, &kept);
    tried[count++] = grid[i];
  }
  for (bool refined = true; refined && status == GEMINI_OK;) {
    refined = false;
    qsort(tried, count, sizeof *tried, compare_count);
    uint32_t best = 0, halves[2], half_count = 0;
    for (uint32_t j = 0; j < count; j++)
      if (tried[j] == p->best.device_count) best = j;
    if (best > 0 && tried[best] - tried[best - 1] > 1)
      halves[half_count++] = tried[best - 1] + (tried[best] - tried[best - 1]) / 2;
    if (best + 1 < count && tried[best + 1] - tried[best] > 1)
      halves[half_count++] = tried[best] + (tried[best + 1] - tried[best]) / 2;
    for (uint32_t h = 0;
         h < half_count && status == GEMINI_OK && may_go_on(p, WORK_LIMIT / 5 * 2) && count < MAX_CANDIDATES; h++) {
      bool kept;
      status = try_candidate(p, halves[h], reduce, &kept);
      if (status == GEMINI_OK && !kept) status = try_candidate(p, halves[h], 0, &kept);
      tried[count++] = halves[h];
      refined = true;
    }
  }
  if (status == GEMINI_OK && p->best.device_count != 0 && may_go_on(p, 0))
    status = try_reductions(p, p->best.device_count, 0);
  return status;
}

/* CPU, and STATIC with its sticky chunks: by rule. */
static gemini_status_t plan_visit(planner_t *p, uint32_t device_count, const uint8_t *sticky, const uint8_t *held) {
  gemini_status_t status = use_model(p, device_count);
  if (status != GEMINI_OK) return status;
  gmi_model_t model = { 0 };
  gmi_hits_t hits = { 0 };
  if (held != p->held) status = gmi_model_make(&p->facts, p->on_device, held, &model);
  if (status == GEMINI_OK) status = gmi_visit_make(held != p->held ? &model : &p->model, sticky, &hits);
  if (status == GEMINI_OK) status = make_moves(p, held != p->held ? &model : &p->model, &hits);
  p->at = (candidate_t){ device_count, 0, p->plan.predicted_ns, p->plan.fetch_count };
  p->best = p->at;
  gmi_hits_free(&hits);
  gmi_model_free(&model);
  return status;
}

static bool is_param(const gmi_plan_input_t *input, uint32_t chunk) {
  return input->chunk_kind[chunk] == GEMINI_KIND_PARAM || input->chunk_kind[chunk] == GEMINI_KIND_GRAD;
}

/* Of total the count that a fraction asks for, rounded up so that a fraction above 0 means one at least. */
static uint64_t fraction_of(uint64_t total, double fraction) {
  double wanted = (double)total * fraction;
  uint64_t count = (uint64_t)wanted;
  if ((double)count < wanted) count++;
  return count < total ? count : total;
}

/* STATIC. fixed: chunks that stay for good, 1, or but for the updates of their host pieces, 2. */
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

  /* Pieces in order of index until their states make up the fraction; a state of several pieces counts once. */
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
  if (!steps_fit(input, held, p->on_device, failure_out)) goto end;
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

/* Twice backwards, as the model's links are made, but for ops' accesses of all chunks, held ones too. */
static gemini_status_t find_next_use(planner_t *p) {
  const gmi_plan_input_t *input = p->input;
  const gmi_facts_t *facts = &p->facts;
  gmi_plan_t *plan = &p->plan;
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
      /* Device pieces run before the host pieces take their chunks, so they are met after them here. */
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
  p.best.device_count = p.at.device_count = NONE;
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
  if (!steps_fit(input, p.held, NULL, failure_out)) goto end;
  status = gmi_facts_make(input, &p.facts);
  if (status != GEMINI_OK) goto end;

  if (input->placement == GEMINI_PLACEMENT_STATIC) {
    status = plan_static(&p, failure_out);
  } else if (input->placement == GEMINI_PLACEMENT_CPU) {
    status = plan_visit(&p, 0, NULL, p.held);
  } else {
    find_order(&p);
    if (input->placement == GEMINI_PLACEMENT_CUDA) status = try_reductions(&p, count_that_fits(&p), 0);
    else status = plan_auto(&p);
  }
  if (status == GEMINI_OK && (p.at.device_count != p.best.device_count || p.at.reduce != p.best.reduce)) {
    /* Only one plan is held at a time, to bound memory: the best is made again. */
    bool kept;
    status = try_candidate(&p, p.best.device_count, p.best.reduce, &kept);
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

/* The policy module's inside: what the planner derives from its input, shared by its files only.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_MODEL_H
#define GMI_MODEL_H

#include "policy/policy.h"

/* What depends on the input alone, not on where pieces run. */
typedef struct gmi_facts {
  const gmi_plan_input_t *input;
  uint32_t *op_piece_first;   /* [op_count + 1] into the next two */
  uint32_t *op_pieces;        /* [piece_count] by after_op, then index */
  uint32_t *op_pieces_by_use; /* [piece_count] by after_op, then soonest next use by an op, then index */
  uint32_t *piece_use; /* [piece_count] next op that uses a shared chunk of it, + op_count when in the next iteration;
                              UINT32_MAX: none */
  uint32_t *pieces_by_gap; /* [piece_count] shortest compute time between the piece and its chunks' next use first */
} gmi_facts_t;

/* An iteration with its pieces placed: steps (ops and device pieces) and their accesses, held chunks left out. */
#define GMI_MODEL_WRITE (UINT32_C(1) << 31)
#define GMI_MODEL_FRESH (UINT32_C(1) << 30)
#define GMI_MODEL_CHUNK (GMI_MODEL_FRESH - 1)
#define GMI_MODEL_LEAVE (UINT32_C(1) << 31)
#define GMI_MODEL_INDEX (GMI_MODEL_LEAVE - 1)
typedef struct gmi_model {
  const gmi_facts_t *facts;
  const uint8_t *on_device; /* [piece_count] borrowed */
  const uint8_t *held;      /* [chunk_count] chunks that hold a frame for good and never move; borrowed */
  uint32_t step_count, access_count, held_count, reserved;
  uint32_t *step_op;    /* [step_count] */
  uint32_t *step_piece; /* [step_count] GMI_NO_PIECE for an op */
  uint32_t *step_first; /* [step_count + 1] into access and next */
  uint32_t *access;     /* chunk | GMI_MODEL_WRITE | GMI_MODEL_FRESH */
  uint32_t *next;       /* index of the same chunk's next access, cyclic (its own if there is one only)
                           | GMI_MODEL_LEAVE when a host piece needs the chunk in between */
} gmi_model_t;

/* Which accesses find their chunk on the device: decisions of MIN, or of a rule. */
typedef struct gmi_hits {
  uint64_t *words;      /* [access_count] bits */
  uint64_t fetch_count; /* accesses that find it elsewhere and need its bytes */
  uint64_t bound_count; /* of MIN: no plan of this capacity fetches less; equal to fetch_count unless cut short */
  uint64_t visits;      /* of accesses and steps that it took to find out */
} gmi_hits_t;

static inline bool gmi_hits_at(const gmi_hits_t *hits, uint32_t access) {
  return (hits->words[access >> 6] >> (access & 63) & 1) != 0;
}
/* Frames for chunks that are not held in this step. The caller has checked that the step fits. */
static inline uint32_t gmi_model_room(const gmi_model_t *model, uint32_t step) {
  const gmi_plan_input_t *input = model->facts->input;
  return input->frame_count - input->ops[model->step_op[step]].heap_frames - model->held_count;
}
static inline uint32_t gmi_plan_piece_end(const gmi_plan_input_t *input, uint32_t piece) {
  return input->pieces[piece + 1].chunk_first;
}

gemini_status_t gmi_facts_make(const gmi_plan_input_t *input, gmi_facts_t *facts_out);
void gmi_facts_free(gmi_facts_t *facts);

gemini_status_t gmi_model_make(const gmi_facts_t *facts, const uint8_t *on_device, const uint8_t *held,
                               gmi_model_t *model_out);
void gmi_model_free(gmi_model_t *model);

/* Belady's MIN with reduce frames less than there are (but never less than a step needs). With reduce 0 it is the
 * optimum; above, where MIN itself does not settle, it may miss it by half a per cent. */
gemini_status_t gmi_min_make(const gmi_model_t *model, uint32_t reduce, gmi_hits_t *hits_out);
/* Every chunk leaves after each step that uses it, but stays for an adjacent step; chunks marked in sticky
 * ([chunk_count] or NULL) leave for host pieces only. */
gemini_status_t gmi_visit_make(const gmi_model_t *model, const uint8_t *sticky, gmi_hits_t *hits_out);
void gmi_hits_free(gmi_hits_t *hits);

/* Fills the plan's moves, residency and counts; all of plan but next_use, optimum_count and times. plan was zeroed,
 * and is ended by gmi_plan_free() on failure too. */
gemini_status_t gmi_schedule_make(const gmi_model_t *model, const gmi_hits_t *hits, gmi_plan_t *plan);

/* As gmi_plan_simulate(). iterations_out: until the steady state; may be NULL. */
gemini_status_t gmi_simulate(const gmi_facts_t *facts, gmi_plan_t *plan, uint32_t *iterations_out);

#endif

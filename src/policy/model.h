/* The policy module's internal records: what the planner derives from its input. Included by the files of this folder
 * only.
 * SPDX-License-Identifier: Apache-2.0
 *
 * plan.c drives: gmi_facts_make() once per input, then per candidate gmi_model_make(), gmi_min_make() or
 * gmi_visit_make() (which accesses hit), gmi_schedule_make() (when chunks move) and gmi_simulate() (how long it
 * takes). */
#ifndef GMI_MODEL_H
#define GMI_MODEL_H

#include "policy/policy.h"

/* Tables that depend on the input alone, not on which pieces run on the device. Every list of all pieces is
 * a permutation of 0..piece_count-1. */
typedef struct gmi_facts {
  const gmi_plan_input_t *input;
  uint32_t *op_piece_first;   /* [op_count + 1] index into op_pieces and op_pieces_by_use */
  uint32_t *op_pieces;        /* [piece_count] sorted by after_op, then index */
  uint32_t *op_pieces_by_use; /* [piece_count] sorted by after_op, then soonest next use by an op, then index */
  uint32_t *op_ahead_first;   /* [op_count + 1] index into op_ahead */
  uint32_t *op_ahead;         /* the pieces that can be computed ahead, sorted by ahead_op, then index */
  uint8_t *can_ahead;         /* [piece_count] 1: one of these */
  /* [piece_count] the next op that uses one of the piece's shared chunks, or waits for a gather from one; + op_count if
   * it is in the next iteration; UINT32_MAX if there is none */
  uint32_t *piece_use;
  /* [piece_count] sorted by the compute time between the piece and the next use of its shared chunks, shortest first */
  uint32_t *pieces_by_gap;
} gmi_facts_t;

/* An iteration with every piece assigned to host or device: the stages (ops and device pieces) and their accesses.
 * Accesses of held chunks are left out. Two flags share a word with the chunk or the index to halve the memory of the
 * planner's largest tables, which is why gmi_plan_make() limits chunks to 30 bits and accesses to 31.
 * Invariants: stage_first ascends and ends with access_count; next is a permutation of the accesses if the flag is
 * masked out (each chunk's accesses form one cycle). */
#define GMI_MODEL_WRITE (UINT32_C(1) << 31)
#define GMI_MODEL_FRESH (UINT32_C(1) << 30)
#define GMI_MODEL_CHUNK (GMI_MODEL_FRESH - 1)
#define GMI_MODEL_LEAVE (UINT32_C(1) << 31)
#define GMI_MODEL_INDEX (GMI_MODEL_LEAVE - 1)
typedef struct gmi_model {
  const gmi_facts_t *facts;
  const uint8_t *on_device; /* [piece_count] 1: runs on the device; borrowed */
  const uint8_t *held;      /* [chunk_count] not 0: the chunk holds a frame for good and never moves; borrowed */
  uint32_t stage_count, access_count, held_count, reserved;
  uint32_t *stage_op;    /* [stage_count] */
  uint32_t *stage_piece; /* [stage_count] GMI_NO_PIECE if the stage is an op */
  uint32_t *stage_first; /* [stage_count + 1] index into access and next */
  uint32_t *access;      /* chunk | GMI_MODEL_WRITE | GMI_MODEL_FRESH */
  /* index of the same chunk's next access, cyclic (its own index if the chunk has one access only); |
   * GMI_MODEL_LEAVE if a host piece needs the chunk in between */
  uint32_t *next;
} gmi_model_t;

/* Which accesses find their chunk on the device (hit), as decided by MIN or by a rule. */
typedef struct gmi_hits {
  uint64_t *words;      /* one bit per access */
  uint64_t fetch_count; /* accesses that miss and need the chunk's bytes */
  /* lower bound: no plan with this capacity fetches less. Equal to fetch_count unless the search was cut short */
  uint64_t bound_count;
  uint64_t visits; /* accesses and stages visited by the search: its cost */
} gmi_hits_t;

static inline bool gmi_hits_at(const gmi_hits_t *hits, uint32_t access) {
  return (hits->words[access >> 6] >> (access & 63) & 1) != 0;
}
/* Frames available to chunks that are not held in this stage. The caller has checked that the stage fits, so this does
 * not underflow. */
static inline uint32_t gmi_model_room(const gmi_model_t *model, uint32_t stage) {
  const gmi_plan_input_t *input = model->facts->input;
  return input->frame_count - input->ops[model->stage_op[stage]].heap_frames - model->held_count;
}
static inline uint32_t gmi_plan_piece_end(const gmi_plan_input_t *input, uint32_t piece) {
  return input->pieces[piece + 1].chunk_first;
}

/* Time of a copy of bytes of a chunk, of which all take chunk_ns. */
static inline uint64_t gmi_plan_part_ns(const gmi_plan_input_t *input, uint64_t chunk_ns, uint64_t bytes) {
  return (uint64_t)((double)chunk_ns * (double)bytes / (double)input->link_bytes);
}

gemini_status_t gmi_facts_make(const gmi_plan_input_t *input, gmi_facts_t *facts_out);
void gmi_facts_free(gmi_facts_t *facts);

gemini_status_t gmi_model_make(const gmi_facts_t *facts, const uint8_t *on_device, const uint8_t *held,
                               gmi_model_t *model_out);
void gmi_model_free(gmi_model_t *model);

/* Computes Belady's MIN with reduce frames less than available, but never less than a stage needs. With reduce 0 the
 * result is the optimum. With reduce > 0, if MIN does not reach a steady state by itself, it may exceed the optimum
 * by half a per cent. */
gemini_status_t gmi_min_make(const gmi_model_t *model, uint32_t reduce, gmi_hits_t *hits_out);
/* The rule of CPU and STATIC: every chunk leaves after each stage that uses it, unless the next stage uses it as well.
 * Chunks marked in sticky ([chunk_count] or NULL) leave for host pieces only. */
gemini_status_t gmi_visit_make(const gmi_model_t *model, const uint8_t *sticky, gmi_hits_t *hits_out);
/* For iterations that use each chunk about once and update nothing: the same share of each stage's chunks comes and
 * goes, by the rule of gmi_visit_make(), and all others stay for good. ring: frames for chunks that come and go in the
 * stage with the least room. *fits_out: it is possible so; if not, hits_out has only the visits. */
gemini_status_t gmi_spread_make(const gmi_model_t *model, uint32_t ring, gmi_hits_t *hits_out, bool *fits_out);
void gmi_hits_free(gmi_hits_t *hits);

/* Fills plan except next_use, piece_use, optimum_count and the times. plan must be zeroed. On failure, too, the
 * caller frees it by gmi_plan_free(). */
gemini_status_t gmi_schedule_make(const gmi_model_t *model, const gmi_hits_t *hits, gmi_plan_t *plan);

/* The busy time of the link of the group whose gathers, or sums, take longest. */
uint64_t gmi_links_busy_ns(const gmi_plan_input_t *input, const gmi_plan_collective_t *all, uint32_t count, bool sums);

/* Returns whether the plan's sizes and indices match the input, so that a plan of another input is refused instead of
 * read out of bounds. */
bool gmi_plan_fits(const gmi_plan_input_t *input, const gmi_plan_t *plan);

/* Does the work of gmi_plan_simulate(). iterations_out: iterations simulated until the steady state; may be NULL. */
gemini_status_t gmi_simulate(const gmi_facts_t *facts, gmi_plan_t *plan, uint32_t *iterations_out);

#endif

/* Plans of gathers (policy/gathers.c), replayed. SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "check.h"
#include "policy/policy.h"
#include "seed.h"

enum { OPS_MOST = 60, CHUNKS_MOST = 24 };

typedef struct {
  gmi_gather_input_t in;
  uint32_t first[OPS_MOST + 1], frames[OPS_MOST], uses[OPS_MOST * CHUNKS_MOST];
  uint32_t most; /* chunks of one op */
} program_t;

static void add_op(program_t *p, const uint32_t *chunks, uint32_t count) {
  uint32_t at = p->first[p->in.op_count];
  for (uint32_t i = 0; i < count; i++) p->uses[at + i] = chunks[i];
  p->first[++p->in.op_count] = at + count;
  if (count > p->most) p->most = count;
}
/* Programs are copied, so the input that points into one is made when it is needed. */
static gmi_gather_input_t input_of(const program_t *p) {
  gmi_gather_input_t in = p->in;
  in.frames = p->frames;
  in.use_first = p->first;
  in.uses = p->uses;
  return in;
}

static void all_frames(program_t *p, uint32_t frames) {
  for (uint32_t op = 0; op < OPS_MOST; op++) p->frames[op] = frames;
}

/* Carries the plan out. Returns the number of gathers; *ahead_out: those of them that come before their op. */
static uint32_t replay(const program_t *p, const gmi_gather_plan_t *plan, uint32_t *ahead_out) {
  bool gathered[CHUNKS_MOST] = { false }, waits[CHUNKS_MOST] = { false };
  uint32_t have = 0, gathers = 0;
  *ahead_out = 0;
  for (uint32_t op = 0; op < p->in.op_count; op++) {
    const uint32_t own = p->first[op + 1] - p->first[op], before = *ahead_out;
    uint32_t next = op + 1; /* the next op that uses any chunk */
    while (next < p->in.op_count && p->first[next] == p->first[next + 1]) next++;
    CHECK_EQ(plan->on_demand[op], own > p->frames[op]);
    for (uint32_t k = p->first[op]; k < p->first[op + 1]; k++) waits[p->uses[k]] = false;
    for (uint32_t e = plan->event_first[op]; e < plan->event_first[op + 1]; e++) {
      uint32_t chunk = plan->events[e].chunk;
      bool used = false;
      for (uint32_t k = p->first[op]; k < p->first[op + 1]; k++) used |= p->uses[k] == chunk;
      CHECK(chunk < p->in.chunk_count);
      CHECK_EQ(gathered[chunk], plan->events[e].leaves); /* none comes or goes twice */
      CHECK(!plan->events[e].leaves || (!p->in.stays && (plan->on_demand[op] || !used)));
      CHECK(plan->events[e].leaves || !plan->on_demand[op]);
      gathered[chunk] = !plan->events[e].leaves;
      have += gathered[chunk] ? 1 : -1u;
      gathers += gathered[chunk];
      *ahead_out += gathered[chunk] && !used;
      waits[chunk] = gathered[chunk] && !used;
      uint32_t waiting = 0;
      for (uint32_t c = 0; c < CHUNKS_MOST; c++) waiting += waits[c];
      CHECK(!waits[chunk] || !p->in.ahead || waiting <= p->in.ahead);
    }
    CHECK_EQ(plan->gathered[op], have);
    for (uint32_t e = plan->event_first[op]; p->in.burst && e < plan->event_first[op + 1]; e++) {
      bool needed = false;
      for (uint32_t k = p->first[op]; next < p->in.op_count && k < p->first[next + 1]; k++)
        needed |= (k < p->first[op + 1] || k >= p->first[next]) && p->uses[k] == plan->events[e].chunk;
      if (!needed && !plan->events[e].leaves) CHECK(*ahead_out - before <= p->in.burst);
    }
    if (!p->in.stays) CHECK(have <= (plan->on_demand[op] ? 0 : p->frames[op]));
    for (uint32_t k = p->first[op]; k < p->first[op + 1]; k++) {
      uint32_t chunk = p->uses[k];
      CHECK(plan->on_demand[op] || gathered[chunk]);
      gathers += !gathered[chunk];
      if (!p->in.stays) continue;
      have += !gathered[chunk];
      gathered[chunk] = true;
    }
  }
  return gathers;
}

static uint32_t plan_and_replay(const program_t *p, uint32_t *ahead_out) {
  gmi_gather_plan_t plan, again;
  const gmi_gather_input_t in = input_of(p);
  CHECK_EQ(gmi_gather_plan_make(&in, &plan), GEMINI_OK);
  CHECK_EQ(gmi_gather_plan_make(&in, &again), GEMINI_OK);
  uint32_t events = plan.event_first[p->in.op_count], gathers = replay(p, &plan, ahead_out);
  CHECK_EQ(again.event_first[p->in.op_count], events);
  for (uint32_t e = 0; e < events; e++)
    CHECK(again.events[e].chunk == plan.events[e].chunk && again.events[e].leaves == plan.events[e].leaves);
  gmi_gather_plan_free(&plan);
  gmi_gather_plan_free(&again);
  CHECK(!plan.events && !plan.event_first);
  return gathers;
}

/* Forward and backward over eight chunks, one for each operator. */
static program_t there_and_back(uint32_t frames) {
  program_t p = { .in = { .chunk_count = 8 } };
  all_frames(&p, frames);
  for (uint32_t c = 0; c < 8; c++) add_op(&p, &c, 1);
  for (uint32_t c = 8; c-- > 0;) add_op(&p, &c, 1);
  return p;
}

static void test_everything_is_gathered_once_if_it_fits(void) {
  program_t p = there_and_back(8);
  uint32_t ahead;
  CHECK_EQ(plan_and_replay(&p, &ahead), 8);
  CHECK_EQ(ahead, 7); /* all but the first, at the first operator */
}

/* The rest comes one by one, as operators use what is there. */
static void test_not_too_many_wait_for_their_use(void) {
  program_t p = there_and_back(8);
  p.in.ahead = 3;
  gmi_gather_plan_t plan;
  const gmi_gather_input_t in = input_of(&p);
  CHECK_EQ(gmi_gather_plan_make(&in, &plan), GEMINI_OK);
  for (uint32_t op = 0; op < 16; op++) CHECK_EQ(plan.gathered[op], op < 4 ? op + 4 : 8);
  gmi_gather_plan_free(&plan);
  uint32_t ahead;
  CHECK_EQ(plan_and_replay(&p, &ahead), 8);
  CHECK_EQ(ahead, 7);
}

/* The first operator is not kept waiting until all have been queued. */
static void test_not_too_many_are_gathered_at_once(void) {
  program_t p = there_and_back(8);
  p.in.burst = 2;
  gmi_gather_plan_t plan;
  const gmi_gather_input_t in = input_of(&p);
  CHECK_EQ(gmi_gather_plan_make(&in, &plan), GEMINI_OK);
  for (uint32_t op = 0; op < 16; op++) CHECK_EQ(plan.gathered[op], op < 3 ? 1 + 2 * (op + 1) : 8);
  gmi_gather_plan_free(&plan);
  uint32_t ahead;
  CHECK_EQ(plan_and_replay(&p, &ahead), 8);
  CHECK_EQ(ahead, 7);
}

/* Nor is the second kept waiting for what it needs itself. */
static void test_the_next_operator_has_all_that_it_needs(void) {
  static const uint32_t chunks[] = { 0, 1, 2, 3, 4, 5, 6, 7 };
  program_t p = { .in = { .chunk_count = 8, .burst = 2 } };
  all_frames(&p, 8);
  add_op(&p, chunks, 1);
  add_op(&p, NULL, 0);
  add_op(&p, chunks + 1, 6);
  add_op(&p, chunks + 7, 1);
  gmi_gather_plan_t plan;
  const gmi_gather_input_t in = input_of(&p);
  CHECK_EQ(gmi_gather_plan_make(&in, &plan), GEMINI_OK);
  CHECK_EQ(plan.gathered[0], 7); /* all but the last one, for which there is a frame */
  CHECK_EQ(plan.gathered[1], 8);
  gmi_gather_plan_free(&plan);
}

/* One chunk for each of 24 operators, in seven frames: of what waits for its use then, three are gathered together, or
 * half. */
static void test_gathers_wait_for_each_other(void) {
  static const uint32_t
      wanted[CHUNKS_MOST] = { [0] = 7, [3] = 3, [6] = 3, [9] = 3, [12] = 3, [15] = 3, [19] = 2 /* the last two */ };
  program_t p = { .in = { .chunk_count = CHUNKS_MOST, .batch = 3 } };
  all_frames(&p, 7);
  for (uint32_t c = 0; c < CHUNKS_MOST; c++) add_op(&p, &c, 1);
  for (; p.in.batch <= CHUNKS_MOST; p.in.batch += CHUNKS_MOST - 3) {
    gmi_gather_plan_t plan;
    const gmi_gather_input_t in = input_of(&p);
    CHECK_EQ(gmi_gather_plan_make(&in, &plan), GEMINI_OK);
    for (uint32_t op = 0; op < CHUNKS_MOST; op++) {
      uint32_t gathers = 0;
      for (uint32_t e = plan.event_first[op]; e < plan.event_first[op + 1]; e++) gathers += !plan.events[e].leaves;
      CHECK_EQ(gathers, wanted[op]);
    }
    gmi_gather_plan_free(&plan);
    uint32_t ahead;
    CHECK_EQ(plan_and_replay(&p, &ahead), CHUNKS_MOST);
    CHECK_EQ(ahead, CHUNKS_MOST - 1); /* no operator waits for its own */
  }
}

/* The first operator has no frame for the last chunk of the third one, which the second one has. */
static void test_what_is_needed_next_does_not_wait(void) {
  static const uint32_t first[] = { 0 }, third[] = { 1, 2, 3, 4, 5, 6, 7 };
  program_t p = { .in = { .chunk_count = 8, .batch = 8 } };
  all_frames(&p, 8);
  p.frames[0] = 7;
  add_op(&p, first, 1);
  add_op(&p, first, 1);
  add_op(&p, third, 7);
  uint32_t ahead;
  CHECK_EQ(plan_and_replay(&p, &ahead), 8);
  CHECK_EQ(ahead, 7);
}

/* With three frames: eight gathers forward; backward the last three are still there. */
static void test_what_is_needed_soonest_stays(void) {
  program_t p = there_and_back(3);
  uint32_t ahead;
  CHECK_EQ(plan_and_replay(&p, &ahead), 8 + 5);
  CHECK_EQ(ahead, 8 + 5 - 1);
}

static void test_one_frame_is_enough_for_one_chunk_at_a_time(void) {
  program_t p = there_and_back(1);
  uint32_t ahead;
  CHECK_EQ(plan_and_replay(&p, &ahead), 8 + 7);
  CHECK_EQ(ahead, 0);
}

/* Its chunks are gathered when it acquires them: three gathers that are no events, with nothing beside them. */
static void test_an_operator_with_more_chunks_than_frames_is_on_demand(void) {
  program_t p = there_and_back(2);
  const uint32_t three[] = { 0, 1, 2 };
  gmi_gather_plan_t plan;
  uint32_t ahead;
  add_op(&p, three, 3);
  const gmi_gather_input_t in = input_of(&p);
  CHECK_EQ(gmi_gather_plan_make(&in, &plan), GEMINI_OK);
  CHECK(plan.on_demand[16] && !plan.on_demand[15]);
  CHECK_EQ(plan.gathered[16], 0);
  CHECK_EQ(plan.event_first[17] - plan.event_first[16], 2); /* both leave */
  gmi_gather_plan_free(&plan);
  CHECK_EQ(plan_and_replay(&p, &ahead), 8 + 6 + 3);
  all_frames(&p, 3);
  CHECK_EQ(plan_and_replay(&p, &ahead), 8 + 5);
}

/* The first operator of the way back leaves room for one chunk only: it is not the sum of two peaks that counts. */
static void test_each_operator_has_its_own_frames(void) {
  program_t p = there_and_back(4);
  uint32_t ahead;
  CHECK_EQ(plan_and_replay(&p, &ahead), 8 + 4);
  p.frames[8] = 1; /* chunk 7 alone stays; 6, 5 and 4 have left and come again */
  CHECK_EQ(plan_and_replay(&p, &ahead), 8 + 7);
  p.frames[8] = 0;
  CHECK_EQ(plan_and_replay(&p, &ahead), 8 + 8);
}

static void test_nothing_is_gathered_ahead_past_an_operator_without_room(void) {
  program_t p = there_and_back(8);
  p.frames[3] = 1;
  gmi_gather_plan_t plan;
  const gmi_gather_input_t in = input_of(&p);
  CHECK_EQ(gmi_gather_plan_make(&in, &plan), GEMINI_OK);
  CHECK_EQ(plan.gathered[0], 4); /* chunks 0 to 3, of which the last goes beyond operator 2 */
  CHECK_EQ(plan.gathered[3], 1);
  CHECK_EQ(plan.gathered[4], 8); /* those that have left come back, for the way back */
  gmi_gather_plan_free(&plan);
  uint32_t ahead;
  CHECK_EQ(plan_and_replay(&p, &ahead), 8 + 3);
}

/* Nothing leaves, so what operators need later counts from then on, whatever their frames. */
static void test_what_stays_is_gathered_once(void) {
  program_t p = there_and_back(8);
  uint32_t ahead;
  p.in.stays = true;
  CHECK_EQ(plan_and_replay(&p, &ahead), 8);
  CHECK_EQ(ahead, 7);
  p.frames[3] = 4;
  CHECK_EQ(plan_and_replay(&p, &ahead), 8);
  p.frames[3] = 0; /* on demand; four chunks are there */
  CHECK_EQ(plan_and_replay(&p, &ahead), 8);
  CHECK_EQ(ahead, 2 + 3);
}

static void test_operators_that_gather_nothing_are_fine(void) {
  program_t p = { .in = { .chunk_count = 2 } };
  all_frames(&p, 1);
  const uint32_t one = 1;
  uint32_t ahead;
  add_op(&p, NULL, 0);
  CHECK_EQ(plan_and_replay(&p, &ahead), 0);
  add_op(&p, &one, 1);
  add_op(&p, NULL, 0);
  CHECK_EQ(plan_and_replay(&p, &ahead), 1);
  CHECK_EQ(ahead, 1);
}

static void test_random_programs_keep_the_rules(void) {
  uint64_t seed = seed_begin(__func__);
  for (uint32_t n = 0; n < 2000; n++, seed++) {
    uint64_t state = seed;
    program_t p = { .in = { .chunk_count = 1 + (uint32_t)(check_random(&state) >> 33) % CHUNKS_MOST } };
    uint32_t ops = (uint32_t)(check_random(&state) >> 33) % OPS_MOST, demand = 0;
    for (uint32_t op = 0; op < ops; op++) {
      uint32_t chunks[CHUNKS_MOST], count = 0, wanted = (uint32_t)(check_random(&state) >> 33) % 5;
      for (uint32_t c = 0; c < p.in.chunk_count; c++)
        if ((check_random(&state) >> 33) % p.in.chunk_count < wanted) chunks[count++] = c;
      add_op(&p, chunks, count);
      demand += count;
    }
    if (!ops) continue;
    const uint32_t least = check_random(&state) >> 63 ? p.most : 0;
    for (uint32_t op = 0; op < ops; op++)
      p.frames[op] = least + (uint32_t)(check_random(&state) >> 33) % (p.in.chunk_count + 1);
    p.in.stays = check_random(&state) >> 63;
    p.in.ahead = (uint32_t)(check_random(&state) >> 33) % 6;
    p.in.burst = (uint32_t)(check_random(&state) >> 33) % 6;
    p.in.batch = (uint32_t)(check_random(&state) >> 33) % 6;
    uint32_t ahead, gathers = plan_and_replay(&p, &ahead);
    if (gathers > demand) seed_print(seed);
    CHECK(gathers <= demand); /* never more than if each operator gathered all that it uses */
  }
}

int main(void) {
  RUN(test_everything_is_gathered_once_if_it_fits);
  RUN(test_not_too_many_wait_for_their_use);
  RUN(test_not_too_many_are_gathered_at_once);
  RUN(test_the_next_operator_has_all_that_it_needs);
  RUN(test_gathers_wait_for_each_other);
  RUN(test_what_is_needed_next_does_not_wait);
  RUN(test_what_is_needed_soonest_stays);
  RUN(test_one_frame_is_enough_for_one_chunk_at_a_time);
  RUN(test_an_operator_with_more_chunks_than_frames_is_on_demand);
  RUN(test_each_operator_has_its_own_frames);
  RUN(test_nothing_is_gathered_ahead_past_an_operator_without_room);
  RUN(test_what_stays_is_gathered_once);
  RUN(test_operators_that_gather_nothing_are_fine);
  RUN(test_random_programs_keep_the_rules);
  return check_done();
}

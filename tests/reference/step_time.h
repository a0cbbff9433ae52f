/* A reference for the planner's prediction of an iteration's time: slow, event by event, with no code of the planner.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef STEP_TIME_H
#define STEP_TIME_H

#include "policy/policy.h"

enum {
  STEP_TIME_FIRST_IN_FIRST_OUT = 1, /* the workers take pieces in the order in which they were submitted */
  STEP_TIME_NONE_AHEAD = 2          /* nothing is computed ahead, whatever the plan says */
};

/* How long the last of so many iterations takes. Inputs without files whose device pieces take turns with the ops.
 * false: a piece was submitted again before it was done, for which there is no rule but that it must be done. */
bool step_time(const gmi_plan_input_t *input, const gmi_plan_t *plan, uint32_t iterations, uint32_t flags,
               uint64_t *length_ns_out);

#endif

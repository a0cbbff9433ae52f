/* Reference for plans: the fewest fetches an iteration, found slowly and on its own.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef MIN_FETCH_H
#define MIN_FETCH_H

#include <stdint.h>

#include "policy/policy.h"

/* The fewest chunks that a plan of one iteration, repeated for ever, fetches in it, with the pieces marked in
 * piece_on_device ([piece_count]) on the device. UINT64_MAX: a stage does not fit, or there is no memory.
 * Takes (stages + chunks) * stages bytes and time in proportion to accesses * stages * rounds. */
uint64_t min_fetch(const gmi_plan_input_t *input, const uint8_t *piece_on_device);

#endif

/* Expects which kind of iteration comes next, from the order of the last ones. SPDX-License-Identifier: Apache-2.0
 *
 * Threads: the caller excludes other uses of the history. */
#ifndef GMI_HISTORY_H
#define GMI_HISTORY_H

#include <stdbool.h>
#include <stdint.h>

/* GMI_HISTORY: iterations remembered. GMI_HISTORY_KINDS: numbers of kinds are below it. */
enum { GMI_HISTORY = 128, GMI_HISTORY_KINDS = 32 };

typedef struct gmi_history {
  uint8_t past[GMI_HISTORY]; /* [count] kinds of the last iterations, newest last */
  uint32_t count;
} gmi_history_t;

/* Appends an iteration, and drops the oldest one of a full history. */
void gmi_history_add(gmi_history_t *h, uint32_t kind);
/* The number will be that of another kind: the iterations of this one count no more. */
void gmi_history_forget(gmi_history_t *h, uint32_t kind);
/* Finds the longest suffix of the past, of `count` iterations, that occurred before, and returns the kind that followed
 * it most often, if it did so at least twice; otherwise tries shorter suffixes. GMI_NONE: no suffix qualifies. */
uint32_t gmi_history_next(const uint8_t *past, uint32_t count);

#endif

/* What the tester is told, and what it does with a program that fails. SPDX-License-Identifier: Apache-2.0 */
#ifndef SETTINGS_H
#define SETTINGS_H

#include "watch.h"

typedef struct settings {
  options_t options;
  uint64_t seeds;
  bool shrinks, statistics, in_process;
  uint32_t shrink_s, least_places;
  bool every_way;
  const char *replay, *save;
  const char *program;   /* as it was called */
  char arguments[1024];  /* all but those of seeds and steps, as they were given */
  fault_kind_t way_kind; /* --way */
  uint64_t way;
} settings_t;

/* Ends the process when the arguments are wrong, or ask for help. */
settings_t settings_of(int argc, char **argv);
/* A program that was written, and what it says of threads, device and files. Ends with free(). */
op_t *program_read(const char *path, options_t *o, uint64_t *count_out);
/* Says how it ended and how to run it again; shrinks and writes it where that is wished for. replayed: the program that
 * was run; NULL: the one made from the seed. */
void tell_failure(const settings_t *s, shared_t *shared, const outcome_t *o, const op_t *replayed,
                  uint64_t replayed_count);
/* --every-way. Returns the exit status. */
int every_way(settings_t *s, watch_t watch);
#endif

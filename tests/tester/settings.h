/* The tester's options, and what it does with a program that fails. SPDX-License-Identifier: Apache-2.0 */
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
  const char *program;   /* argv[0] */
  char arguments[1024];  /* as given, except those for seeds and steps */
  fault_kind_t way_kind; /* --way */
  uint64_t way;
} settings_t;

/* Reads the arguments. Ends the process if they are wrong or ask for help. */
settings_t settings_of(int argc, char **argv);
/* Reads a program from a file, and sets the threads, the device and the files in o that it was made for. The caller
 * frees the result. */
op_t *program_read(const char *path, options_t *o, uint64_t *count_out);
/* Prints how the program ended and how to run it again; shrinks it and writes it to a file if the options ask for that.
 * replayed: the program that was run; NULL: the program was made from the seed. */
void tell_failure(const settings_t *s, shared_t *shared, const outcome_t *o, const op_t *replayed,
                  uint64_t replayed_count);
/* --every-way. Returns the exit status. */
int every_way(settings_t *s, watch_t watch);
#endif

/* Programs in processes of their own, watched. SPDX-License-Identifier: Apache-2.0 */
#ifndef WATCH_H
#define WATCH_H

#include "tester.h"

typedef enum { ENDED_WELL, ENDED_DIFFERENT, ENDED_BY_SIGNAL, ENDED_HANGING, ENDED_LEAKING } end_kind_t;
typedef struct outcome {
  end_kind_t kind;
  int signal, code;
  char message[4096];
  double seconds;
} outcome_t;

/* Memory shared with children. */
typedef struct watch {
  shared_t *shared;
  int fd;
} watch_t;
watch_t watch_new(uint32_t threads, uint64_t log_capacity);
/* Runs a program in a child: made at random, or these operations. quiet: what the child prints is thrown away. */
outcome_t run_child(const options_t *options, watch_t watch, const op_t *ops, uint64_t count, bool quiet);
/* The child: this program, started with --child FD. */
int child_main(int fd);
const char *end_words(const outcome_t *o);

/* What a child has run, thread by thread and round by round. Ends with free(). */
op_t *program_of(shared_t *s, const options_t *o, uint64_t *count_out);
/* Leaves out what is not needed for the same end. */
op_t *shrink(const options_t *options, const op_t *ops, uint64_t *count, const outcome_t *like, uint32_t seconds);
#endif

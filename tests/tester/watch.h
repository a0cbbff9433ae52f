/* Runs each program in a process of its own and watches it. SPDX-License-Identifier: Apache-2.0 */
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
/* Runs a program in a child: these operations, or a random program if ops is NULL. quiet: discards what the child
 * prints. */
outcome_t run_child(const options_t *options, watch_t watch, const op_t *ops, uint64_t count, bool quiet);
/* The child: this program, started with --child FD. */
int child_main(int fd);
const char *end_words(const outcome_t *o);

/* The operations that a child has run, by thread and round. The caller frees the result. */
op_t *program_of(shared_t *s, const options_t *o, uint64_t *count_out);
/* Removes operations as long as the program still ends in the same way. */
op_t *shrink(const options_t *options, const op_t *ops, uint64_t *count, const outcome_t *like, uint32_t seconds);
#endif

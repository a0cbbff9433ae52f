/* The bytes that a model is trained on, and batches of them.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_TEXT_H
#define BENCH_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct text {
  unsigned char *bytes; /* owned */
  uint64_t count;
} text_t;

/* Reads a file, or all regular files of a directory in the order of their names, links followed, each file once
 * however many names it has. On failure message_out (message_bytes) says why.
 * The same text wherever the same files are: no other order than that of the names' bytes enters. */
bool text_load(text_t *text, const char *path, char *message_out, size_t message_bytes);
void text_free(text_t *text);

/* Draws batch places in the text and copies context + 1 bytes from each. tokens: (batch, context + 1). The text has
 * more than context bytes. */
void text_batch(const text_t *text, uint64_t *random, int batch, int context, int32_t *tokens);

#endif

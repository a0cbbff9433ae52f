/* memory.c's functions without libgemini. SPDX-License-Identifier: Apache-2.0 */
#ifndef EXAMPLES_PLAIN_H
#define EXAMPLES_PLAIN_H

#include "memory.h"

void plain_ready(memory_t *memory);
void plain_close(memory_t *memory);
/* Returns a tensor's address on the device or, with host, one that the calling thread can use. */
void *plain_acquire(memory_t *memory, bool host, uint32_t kind, uint32_t mode, int tensor);
void plain_release(memory_t *memory, uint32_t kind, int tensor);
/* See memory_gradients_add(). The device must be the CPU. */
void plain_gradients_add(memory_t *memory, int index, int count);
double plain_gradient_norm(memory_t *memory,
                           double (*squares)(const uint16_t *from, uint64_t count, uint64_t block_elements));
void plain_update(memory_t *memory, const memory_arrays_t *arrays, uint64_t first, uint64_t count, gemini_update_fn fn,
                  void *user);

#endif

/* What a machine can do: the rates that bound a training step. SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_RATES_H
#define BENCH_RATES_H

#include <stdbool.h>
#include <stdint.h>

#include "common/gpu.h"

/* Bytes a second; 0: not measured. */
typedef struct rates {
  double to_device, from_device, both_ways; /* page-locked copies of 256 MiB, one way and both at once */
  double host;                              /* reading and writing memory, all threads; both count */
  double update;                            /* the same of the optimizer's own pass: 28 bytes an element */
  double file_read, file_write;             /* large blocks past the page cache */
} rates_t;

/* False after printing why not, as all of these. gpu NULL: nothing is measured. */
bool rates_copies(rates_t *rates, gpu_t *gpu);
/* @param bytes of the memory that is passed over */
bool rates_host(rates_t *rates, const char *program, uint32_t threads, uint64_t bytes);
/* @param dirs as gemini_config_t.file_dir; each gets a file of bytes, which vanishes */
bool rates_files(rates_t *rates, const char *program, const char *dirs, uint64_t bytes);

#endif

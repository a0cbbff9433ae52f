/* The GPU's kernels by name, what each is given, and how its threads are laid out. SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_KERNELS_H
#define BENCH_KERNELS_H

#include <stdint.h>

#include "gpt.h"

/* The PTX of gpt_kernels.cu, which the build embeds. */
extern const char gpt_kernels_ptx[];

/* Threads of a block, by the kernel's kind. */
enum {
  KERNEL_ELEMENTS = 256, /* one thread an element */
  KERNEL_COLUMNS = 32,   /* one thread a column, which it sums downwards */
  KERNEL_LANES = 16,     /* a row's threads, the CPU's partial sums of a row: see sum() in gpt.c */
  KERNEL_BLOCK_ROWS = 8, /* rows of a block */
  KERNEL_ROWS = KERNEL_LANES * KERNEL_BLOCK_ROWS,
  KERNEL_ONE = 1
};

typedef struct kernel_widen {
  uint64_t count;
  const uint16_t *from; /* (count) */
  float *to;            /* (count) */
} kernel_widen_t;

typedef struct kernel_linear_start {
  uint64_t count; /* rows * out */
  int out;
  const uint16_t *bias;  /* (out), or NULL */
  const float *residual; /* (rows, out), or NULL; may be y */
  float *y;              /* (rows, out) */
} kernel_linear_start_t;

typedef struct kernel_columns {
  int rows, out;
  const float *dy; /* (rows, out) */
  uint16_t *sums;  /* (out) */
} kernel_columns_t;

typedef struct kernel_softmax {
  int rows, context; /* rows: heads * context */
  float *p;          /* (rows, context): scores, and then weights; a row's number modulo context is its position */
} kernel_softmax_t;

typedef struct kernel_softmax_gradient {
  int rows, context;
  float scale;    /* 1 / sqrt(D) */
  const float *p; /* (rows, context) */
  float *ds;      /* (rows, context): dp, and then ds */
} kernel_softmax_gradient_t;

typedef struct kernel_adamw {
  uint64_t count;
  gpt_adamw_factors_t factors;
  const uint16_t *gradient;            /* (count) */
  uint16_t *parameter;                 /* (count); may be gradient */
  float *master, *momentum, *variance; /* (count) */
} kernel_adamw_t;

typedef struct kernel_squares {
  uint64_t count, block; /* elements, of them in a block */
  const uint16_t *from;  /* (count) */
  double *sums;          /* a block each */
} kernel_squares_t;

/* X(name, argument's type, threads of a block). Each takes its argument by value. */
#define GPT_KERNELS(X)                                        \
  X(store, gpt_store_t, KERNEL_ELEMENTS)                      \
  X(widen, kernel_widen_t, KERNEL_ELEMENTS)                   \
  X(embed_forward, gpt_embed_t, KERNEL_ELEMENTS)              \
  X(embed_tokens, gpt_embed_gradient_t, KERNEL_ELEMENTS)      \
  X(embed_positions, gpt_embed_gradient_t, KERNEL_ELEMENTS)   \
  X(norm_forward, gpt_norm_t, KERNEL_ROWS)                    \
  X(norm_rows, gpt_norm_gradient_t, KERNEL_ROWS)              \
  X(norm_columns, gpt_norm_gradient_t, KERNEL_COLUMNS)        \
  X(linear_start, kernel_linear_start_t, KERNEL_ELEMENTS)     \
  X(columns, kernel_columns_t, KERNEL_COLUMNS)                \
  X(softmax, kernel_softmax_t, KERNEL_ROWS)                   \
  X(softmax_gradient, kernel_softmax_gradient_t, KERNEL_ROWS) \
  X(gelu_forward, gpt_gelu_t, KERNEL_ELEMENTS)                \
  X(gelu_backward, gpt_gelu_gradient_t, KERNEL_ELEMENTS)      \
  X(loss_rows, gpt_loss_t, KERNEL_ROWS)                       \
  X(loss_total, gpt_loss_t, KERNEL_ONE)                       \
  X(adamw, kernel_adamw_t, KERNEL_ELEMENTS)                   \
  X(squares, kernel_squares_t, KERNEL_COLUMNS)

#endif

/* Control of the stand-in for NCCL (fake_nccl.c). SPDX-License-Identifier: Apache-2.0 */
#ifndef FAKE_NCCL_H
#define FAKE_NCCL_H

#include <stdbool.h>
#include <stdint.h>

#include "check.h"
#include "device/cuda_driver.h"
#include "fake_cuda.h"

/* fake_nccl_reset() puts the defaults back. */
typedef struct fake_nccl_options {
  int version;         /* what ncclGetVersion() says; 23007 */
  uint32_t polls;      /* how often ncclCommGetAsyncError() says "in progress" before NCCL queues the work; 2 */
  const char *words;   /* of ncclGetLastError(); "" */
  const char *stalled; /* a function after which the communicator of `stalled_rank` stays in progress; NULL */
  uint32_t stalled_rank;
  _Atomic bool kernels_hang; /* kernels run until their communicator is aborted */
  _Atomic bool kernels_stay; /* nothing ends them, until this is false again */
  _Atomic bool abort_hangs;  /* ncclCommAbort() returns when this is false again */
} fake_nccl_options_t;
extern fake_nccl_options_t fake_nccl;

/* Forgets everything; no kernel may run. */
void fake_nccl_reset(void);
/* Functions by name, as dlsym() gives them, except fake_nccl_lacking. */
void *fake_nccl_symbol(const char *name);
extern const char *fake_nccl_lacking; /* a function that this NCCL does not have; NULL: none */
/* The call number `call` from now on (0: the next one) of that function fails with the result; NULL: none. */
void fake_nccl_fail(const char *function, uint32_t call, int result);
/* Calls of that function since the reset. */
uint32_t fake_nccl_calls(const char *function);
/* max_ctas of the communicator of the last such call; 0: it has none. */
uint32_t fake_nccl_max_ctas(const char *function);
/* Collectives so far of communicators that have registered memory, in it and elsewhere; memories registered now. */
uint32_t fake_nccl_in_registered(void);
uint32_t fake_nccl_beside_registered(void);
uint32_t fake_nccl_registered(void);
/* From now on ncclCommGetAsyncError() says this of the rank's communicators. */
void fake_nccl_async(uint32_t rank, int result);
/* Groups that the thread has begun and not ended. */
int fake_nccl_depth(void);
/* Communicators that have not been destroyed or aborted. */
uint32_t fake_nccl_live(void);
/* Calls that no program may make, each printed to standard error: with wrong buffers, in a wrong order, by two threads
 * at once, of what has been destroyed, other than those of the other ranks. */
uint32_t fake_nccl_violations(void);

/* A test over the stand-ins for NCCL and for the CUDA driver: it leaves nothing, and nothing forbidden has happened. */
static inline void fakes_begin(void) {
  fake_cuda_reset();
  fake_nccl_reset();
  gmi_cuda_driver_replace(fake_cuda_symbol);
}
static inline void fakes_end(void) {
  CHECK_EQ(fake_nccl_live(), 0);
  CHECK_EQ(fake_nccl_violations(), 0);
  CHECK_EQ(fake_cuda_violations(), 0);
  CHECK_EQ(fake_cuda_live(true), 0);
  fake_cuda_reset();
  fake_nccl_reset();
}

#endif

/* Control of the fake CUDA driver (fake_cuda.c). SPDX-License-Identifier: Apache-2.0 */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stdbool.h>
#include <stdint.h>

/* Set while no context is retained; fake_cuda_reset() puts the defaults back. */
typedef struct fake_cuda_options {
  int device_count;            /* 2 */
  int lacking_attribute;       /* a CUdevice_attribute that no device has; 0 = none */
  const char *lacking_symbol;  /* a function that the driver does not have; NULL = none */
  uint32_t channels;           /* hardware queues that streams share, at most 64; 32 */
  uint32_t queue_limit;        /* work waiting in one of them, after which queueing blocks; 1024 */
  uint64_t memory_bytes;       /* of each device; 1 GiB */
  double clock_rate;           /* the devices' seconds in a second; 1 */
  void (*on_wait_value)(void); /* called when one is queued; NULL */
  void (*on_event)(void);      /* called when one is about to be created, which then takes as long as this; NULL */
  uint64_t sum_delay_ns;       /* before each sum in the order of ranks; 0 */
  bool reuse_streams;          /* a new stream gets the handle of one that was destroyed, and other work's queue */
} fake_cuda_options_t;
extern fake_cuda_options_t fake_cuda;

/* Functions by name, as dlsym() gives them; NULL: no such function. */
void *fake_cuda_symbol(const char *name);
/* Options and counts back to the start, no failure to come. */
void fake_cuda_reset(void);

/* Calls so far, of any function that can fail. */
uint64_t fake_cuda_calls(void);
/* The calls numbered first to last by fake_cuda_calls() do nothing and return result; last 0: none. */
void fake_cuda_fail(uint64_t first, uint64_t last, int result);
/* From now on that function does nothing and returns result; NULL ends it. */
void fake_cuda_fail_function(const char *name, int result);
/* What a kernel's fault does: nothing queued runs any more, every call returns result. Until the next reset. */
void fake_cuda_lose(int result);

/* A graph is being captured of the stream, until this is called again with false. */
void fake_cuda_capture(void *stream, bool capturing);
/* The driver's functions for graphs, which the library does not call. */
struct cu_graph;
struct cu_stream;
int cuStreamBeginCapture_v2(struct cu_stream *stream, int mode);
int cuStreamEndCapture(struct cu_stream *stream, struct cu_graph **graph_out);
int cuGraphInstantiateWithFlags(struct cu_graph **exec_out, struct cu_graph *graph, unsigned long long flags);
int cuGraphLaunch(struct cu_graph *exec, struct cu_stream *stream);
int cuGraphDestroy(struct cu_graph *graph);
int cuGraphExecDestroy(struct cu_graph *exec);
/* Of its copies, how many there are, and how many need not wait for the host function captured last before them. */
void fake_cuda_graph_nodes(const struct cu_graph *graph, uint32_t *copies_out, uint32_t *beside_out);
/* How this thread's captures of graphs bear with others' calls (CUstreamCaptureMode); 0 = not at all. */
int fake_cuda_capture_mode(void);

/* As the driver has it: 0, or below for streams whose kernels are begun first. */
int fake_cuda_stream_priority(const struct cu_stream *stream);

/* For a stand-in of another library. Queues a kernel, which runs until step(user) returns true; it is called again and
 * again on a thread of the stream's, which may wait a little in it. Returns what cuLaunchKernel() would. */
struct cu_stream;
int fake_cuda_kernel(struct cu_stream *stream, bool (*step)(void *user), void *user);
/* The device of the thread's context; -1: it has none. */
int fake_cuda_device(void);
/* Can devices reach all of these bytes? */
bool fake_cuda_reachable(const void *address, uint64_t size);
/* Names the memory that is mapped at the address; 0: none. */
uint64_t fake_cuda_memory_at(const void *address);

/* What has been made and not ended, all kinds together; printed by kind to standard error when print. */
uint64_t fake_cuda_live(bool print);
/* Copies whose host memory was not page-locked, so that they blocked. */
uint64_t fake_cuda_pageable_copies(void);
/* Calls that no program may make, whatever they return: of the driver inside a host function, with no or another
 * device's context, of what has been destroyed. */
uint64_t fake_cuda_violations(void);

#endif

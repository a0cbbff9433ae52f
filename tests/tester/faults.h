/* Faults on demand: the library's calls of the system, any of which can be made to fail. SPDX-License-Identifier: Apache-2.0
 *
 * faults.c is linked into a shared library together with all of libgemini's objects. The linker's --wrap sends each of
 * the library's references to malloc() and its kin through a function there. Only the library's own calls pass it: what
 * the tester, libc or a sanitizer allocates does not. */
#ifndef FAULTS_H
#define FAULTS_H

#include <stdbool.h>
#include <stdint.h>

typedef enum {
  FAULT_NONE,
  FAULT_MEMORY, /* malloc, calloc, realloc, aligned_alloc, strdup, mmap, mprotect, memfd_create, open_memstream */
  FAULT_THREAD, /* pthread_create */
  FAULT_FILE,   /* open, pread, pwrite, fallocate, fsync, rename, ... and fopen */
  FAULT_RING,   /* io_uring's setup, registration and submission */
  FAULT_DRIVER, /* calls of the CUDA driver, which the fake driver lets fail (not in faults.c) */
  FAULT_KINDS
} fault_kind_t;

/* Calls of a kind since the last faults_arm(): all after the first `skip` fail, until `run` of them have failed.
 * error: the errno; 0: one that the function really gives. any_thread: else only calls of this thread count. */
__attribute__((visibility("default"))) void faults_arm(fault_kind_t kind, uint64_t skip, uint64_t run, int error,
                                                       bool any_thread);
/* No more faults. Returns how many calls have failed since faults_arm(). */
__attribute__((visibility("default"))) uint64_t faults_disarm(void);
/* This thread's calls pass unharmed and uncounted until it says false. */
__attribute__((visibility("default"))) void faults_pause(bool pause);
/* Calls of a kind that have failed so far, of all threads. */
__attribute__((visibility("default"))) uint64_t faults_failed(fault_kind_t kind);
/* Calls of the armed kind since faults_arm(), failed or not. */
__attribute__((visibility("default"))) uint64_t faults_calls(void);

/* A way in which the library calls the system: the same in every process. */
typedef struct fault_site {
  uint64_t place; /* where it is called: the return address in the shared library */
  uint64_t path;  /* and by whom: a hash of the return addresses in the library */
  uint64_t calls;
  char function[40];
  fault_kind_t kind;
} fault_site_t;
/* From now on each call is noted by its way, which is slow. */
__attribute__((visibility("default"))) void faults_note_sites(bool note);
/* The ways noted so far. */
__attribute__((visibility("default"))) uint32_t faults_sites(fault_site_t *sites_out, uint32_t capacity);
/* The next call that comes this way fails, on any thread. */
__attribute__((visibility("default"))) void faults_arm_site(uint64_t path);
/* Has it? */
__attribute__((visibility("default"))) bool faults_site_failed(void);
/* The file of the shared library, for addr2line. */
__attribute__((visibility("default"))) const char *faults_library(void);

/* Lets the library open the CUDA driver whose functions symbol() gives, as its own tests do. */
__attribute__((visibility("default"))) void faults_use_driver(void *(*symbol)(const char *name));
#endif

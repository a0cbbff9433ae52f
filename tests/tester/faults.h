/* Faults on demand: any system call of the library can be made to fail. SPDX-License-Identifier: Apache-2.0
 *
 * faults.c is linked into a shared library together with all of libgemini's objects. The linker's --wrap sends each of
 * the library's references to malloc() and similar functions through a wrapper in faults.c. Only the library's own
 * calls go through the wrappers; allocations of the tester, libc and sanitizers do not. */
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

/* Makes calls of a kind fail: from now on, the first `skip` calls succeed and the next `run` fail. error: the errno; 0:
 * one that the function really returns. any_thread: calls of all threads count; otherwise only those of this thread. */
__attribute__((visibility("default"))) void faults_arm(fault_kind_t kind, uint64_t skip, uint64_t run, int error,
                                                       bool any_thread);
/* No more faults. Returns how many calls have failed since faults_arm(). */
__attribute__((visibility("default"))) uint64_t faults_disarm(void);
/* pause true: this thread's calls neither fail nor count, until it calls this with false. */
__attribute__((visibility("default"))) void faults_pause(bool pause);
/* Returns how many calls of a kind have been made to fail so far, in all threads. */
__attribute__((visibility("default"))) uint64_t faults_failed(fault_kind_t kind);
/* Returns how many calls of the armed kind were made since faults_arm(), failed or not. */
__attribute__((visibility("default"))) uint64_t faults_calls(void);

/* A way in which the library makes a system call; it is the same in every process. */
typedef struct fault_site {
  uint64_t place; /* where the call is: the return address in the shared library */
  uint64_t path;  /* how execution got there: a hash of the return addresses in the library */
  uint64_t calls;
  char function[40];
  fault_kind_t kind;
} fault_site_t;
/* note true: from now on the way of each call is recorded, which is slow. */
__attribute__((visibility("default"))) void faults_note_sites(bool note);
/* Copies the ways recorded so far and returns their number. */
__attribute__((visibility("default"))) uint32_t faults_sites(fault_site_t *sites_out, uint32_t capacity);
/* The next call that comes this way fails, on any thread. */
__attribute__((visibility("default"))) void faults_arm_site(uint64_t path);
/* Has a call failed since faults_arm_site()? */
__attribute__((visibility("default"))) bool faults_site_failed(void);
/* The file of the shared library, for addr2line. */
__attribute__((visibility("default"))) const char *faults_library(void);

/* Makes the library take the CUDA driver's functions from symbol(), as its own tests do. */
__attribute__((visibility("default"))) void faults_use_driver(void *(*symbol)(const char *name));
#endif

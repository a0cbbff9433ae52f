/* Shared libraries that are opened at run time, so that programs start on machines without them.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_LIBRARY_H
#define GMI_LIBRARY_H

#include <stdbool.h>

/* In static storage; the first fields are set, the others begin as zeros. */
typedef struct gmi_library {
  const char *file;   /* as dlopen() takes it: "libcuda.so.1" */
  const char *absent; /* begins the message if it cannot be opened: "no CUDA driver on this machine" */
  const char *folder; /* environment variable that names the library's folder, for users; NULL: none */
  /* Looks up what the library must have, and keeps it. False, with the error recorded: the library cannot be used; the
   * next gmi_library_open() calls this again. */
  bool (*find)(const struct gmi_library *library);

  /* of library.c */
  bool found;
  void *handle; /* never closed: threads of the library run its code to the end of the process */
  void *(*replacement)(const char *name); /* for tests: looks up functions instead of dlsym() */
} gmi_library_t;

/* Opens the library and calls find(), unless that has succeeded before. False: the thread's last error says why. What
 * find() has kept stays for the life of the process, so callers use it without a lock. Threads: any, and a child made
 * by fork() in the middle of a call. */
bool gmi_library_open(gmi_library_t *library);
/* For find(): sets *function_out, a pointer to a function. False: the library has none of this name; it is NULL. */
bool gmi_library_function(const gmi_library_t *library, const char *name, void *function_out);
/* For tests: functions are looked up by symbol() instead of in the library; NULL returns to the library. */
void gmi_library_replace(gmi_library_t *library, void *(*symbol)(const char *name));

#endif

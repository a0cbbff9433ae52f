/* How much memory this process may still take, and which limit binds. SPDX-License-Identifier: Apache-2.0
 *
 * Each call reads the system's files anew: nothing is cached or changed. Threads: any. */
#ifndef GMI_LIMITS_H
#define GMI_LIMITS_H

#include <stdbool.h>
#include <stdint.h>

#include "gemini.h"

#define GMI_LIMIT_NONE UINT64_MAX

typedef struct gmi_limit {
  uint64_t limit_bytes; /* GMI_LIMIT_NONE: unlimited */
  uint64_t used_bytes;  /* counted against the limit now, without what the kernel reclaims by itself (file cache) */
  uint64_t free_bytes;  /* limit - used, at least 0; GMI_LIMIT_NONE: unlimited */
  char name[192];       /* "memory.max of cgroup /a/b", "RLIMIT_AS", ...; "": unlimited */
} gmi_limit_t;

typedef struct gmi_limits {
  gmi_limit_t memory;    /* the binding limit: of cgroup, available and process the one with the fewest free bytes */
  gmi_limit_t cgroup;    /* the tightest limit of the process's cgroup and all cgroups above it */
  gmi_limit_t available; /* the machine's: MemAvailable, and memory that it has but does not show yet (limits.c) */
  gmi_limit_t process;   /* the tighter of RLIMIT_AS and RLIMIT_DATA */
  gmi_limit_t locked;    /* RLIMIT_MEMLOCK: applies to mlock() and io_uring, not to memory that a GPU driver locks */
} gmi_limits_t;

/* root is prefixed to every path: "" for this machine, or a test's directory with copies of /proc and /sys. A file that
 * does not exist sets no limit. IO: a file exists but cannot be read. FORMAT: a file has contents that no kernel
 * writes; the message names it. */
gemini_status_t gmi_limits_read(const char *root, gmi_limits_t *limits_out);

/* The default size of the host tier: four fifths of the free bytes, in whole 2 MiB. The rest is left to the process
 * itself, its page cache and other processes. with_lock: `locked` applies, too. 0: nothing is known or free. */
uint64_t gmi_limits_default_host_bytes(const gmi_limits_t *limits, bool with_lock);

/* OOM_HOST: asked_bytes exceed the free bytes; the message names the value, the limit, what is in use, and where the
 * limit comes from. what: the name of the value ("host_bytes"). */
gemini_status_t gmi_limits_check(const gmi_limits_t *limits, const char *what, uint64_t asked_bytes, bool with_lock);

#endif

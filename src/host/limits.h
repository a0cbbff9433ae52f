/* What memory this process may still take, and which limit says so. SPDX-License-Identifier: Apache-2.0
 *
 * Read from the system's files at each call: nothing is cached, nothing is touched. Threads: any. */
#ifndef GMI_LIMITS_H
#define GMI_LIMITS_H

#include <stdbool.h>
#include <stdint.h>

#include "gemini.h"

#define GMI_LIMIT_NONE UINT64_MAX

typedef struct gmi_limit {
  uint64_t limit_bytes; /* GMI_LIMIT_NONE: there is none */
  uint64_t used_bytes;  /* counted against it now, without what the kernel takes back by itself (file cache) */
  uint64_t free_bytes;  /* limit - used, or 0; GMI_LIMIT_NONE without a limit */
  char name[192];       /* "memory.max of cgroup /a/b", "RLIMIT_AS", ...; "" without a limit */
} gmi_limit_t;

typedef struct gmi_limits {
  gmi_limit_t memory;    /* the one with the fewest free bytes of all below except locked: it binds */
  gmi_limit_t cgroup;    /* the tightest of its cgroup and all cgroups above it */
  gmi_limit_t available; /* the machine: MemAvailable, and memory that it has but does not show yet (limits.c) */
  gmi_limit_t process;   /* the tighter of RLIMIT_AS and RLIMIT_DATA */
  gmi_limit_t locked;    /* RLIMIT_MEMLOCK: binds only what mlock() or io_uring lock, not what a GPU driver locks */
} gmi_limits_t;

/* root is put before every path: "" is this machine, a directory is a test's copy of /proc and /sys. A file that does
 * not exist limits nothing.
 * IO: a file is there but cannot be read. FORMAT: a file says what no kernel writes; the message names it. */
gemini_status_t gmi_limits_read(const char *root, gmi_limits_t *limits_out);

/* What the host tier takes when the caller names no number: four fifths of what memory leaves free, in whole 2 MiB.
 * The rest is for the process itself, its page cache and its neighbours. with_lock: within locked, too. 0 when
 * nothing is known or nothing is left. */
uint64_t gmi_limits_default_host_bytes(const gmi_limits_t *limits, bool with_lock);

/* OOM_HOST when asked_bytes are more than may be taken; the message names what was asked, the limit, what of it is in
 * use, and where it comes from. what: the name of the value asked for ("host_bytes"). */
gemini_status_t gmi_limits_check(const gmi_limits_t *limits, const char *what, uint64_t asked_bytes, bool with_lock);

#endif

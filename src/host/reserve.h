/* The host tier's memory: one range of addresses, backed part by part. SPDX-License-Identifier: Apache-2.0
 *
 * The range has the requested size, rounded up to whole pages, lies between two guard pages without access, and does
 * not exist in forked children, which could only get copies of it. It costs only addresses until a part is committed:
 * then all pages of the part exist, on huge pages where the system grants them, and on the wanted NUMA nodes as long as
 * these have space. Newly committed memory reads as zero. Memory that is not committed must not be touched.
 *
 * The memory is not page-locked here: the device locks committed parts. Unlock a part before decommitting it. */
#ifndef GMI_RESERVE_H
#define GMI_RESERVE_H

#include <sched.h>
#include <stdbool.h>
#include <stdint.h>

#include "gemini.h"
#include "host/topology.h"

typedef struct gmi_reserve gmi_reserve_t;

enum { GMI_RESERVE_SMALL_PAGES = 1 /* no huge pages: needed for parts smaller than a huge page */ };

typedef struct gmi_reserve_config {
  uint64_t size_bytes;            /* not 0 */
  uint32_t flags;                 /* GMI_RESERVE_* */
  uint32_t threads;               /* that touch memory at commit; 0 = one per core of the process; at most 64 */
  const gmi_topology_t *topology; /* NULL: not bound; borrowed until return */
  const uint32_t *nodes;          /* node_count indices of NUMA nodes in topology; borrowed until return */
  uint32_t node_count;            /* 0: not bound */
  uint32_t reserved;
  const char *root; /* put before the paths of system files: "" or NULL, or a test's directory; borrowed until return */
} gmi_reserve_config_t;

typedef struct gmi_reserve_figures {
  uint64_t size_bytes;      /* of the range, whole pages */
  uint64_t committed_bytes; /* in committed parts */
  uint64_t resident_bytes;  /* in pages that exist, by /proc/self/smaps */
  uint64_t huge_bytes;      /* of these, on huge pages */
  uint64_t grain_bytes;
  bool bound;     /* to NUMA nodes */
  char note[240]; /* why it is not on huge pages or not bound, for the log; "": neither applies */
} gmi_reserve_figures_t;

/* OOM_HOST: the system has no address range of size_bytes; OOM_SYSTEM: no memory for records. A refusal of huge pages
 * or of the binding is no failure: figures give the reason. */
gemini_status_t gmi_reserve_open(const gmi_reserve_config_t *config, gmi_reserve_t **reserve_out);
void gmi_reserve_close(gmi_reserve_t *reserve); /* NULL is accepted */

/* Aligned to a huge page where they are used, to at least 64 KiB otherwise. */
uint8_t *gmi_reserve_base(const gmi_reserve_t *reserve);
uint64_t gmi_reserve_size(const gmi_reserve_t *reserve);
/* Parts begin and end at multiples of a grain, which is a huge page or a page, or at the end of the range. Smaller
 * parts make no sense: a huge page of which a part is given back stays whole until the system runs short of memory. */
uint64_t gmi_reserve_grain(const gmi_reserve_t *reserve);
/* The cores of the process that are next to the nodes that the memory is to lie on. False: none are, or no nodes were
 * named; *cores_out is as it was. */
bool gmi_reserve_cores(const gmi_reserve_t *reserve, cpu_set_t *cores_out);

/* Makes every page of a part exist. Grains that are committed already keep their bytes. Large parts are touched by
 * several threads. OOM_HOST: the system did not promise or provide the memory; INVALID: not a part of the range;
 * nothing changed. Threads: any; a call waits for others that commit some of the same grains. This call blocks. */
gemini_status_t gmi_reserve_commit(gmi_reserve_t *reserve, uint64_t offset_bytes, uint64_t size_bytes);
/* The same for memory that is not needed yet, beside threads that are at work. It is touched by stores, where
 * gmi_reserve_commit() has the kernel make many pages in one call, in which no other thread can change the process's
 * mappings; and malloc() often does. As a store without memory ends the process, OOM_HOST if the system has less than
 * that three times and 256 MiB left. IO, FORMAT: as gmi_limits_read(). */
gemini_status_t gmi_reserve_commit_early(gmi_reserve_t *reserve, uint64_t offset_bytes, uint64_t size_bytes);
/* Gives the committed pages of a part back to the system; their bytes are lost. IO: the system refused (some of it is
 * locked); those pages stay committed. */
gemini_status_t gmi_reserve_decommit(gmi_reserve_t *reserve, uint64_t offset_bytes, uint64_t size_bytes);

/* Reads /proc/self/smaps: milliseconds in a large process. IO: it cannot be read. */
gemini_status_t gmi_reserve_figures(gmi_reserve_t *reserve, gmi_reserve_figures_t *figures_out);

#endif

/* The host tier's memory: one range of addresses, backed part by part. SPDX-License-Identifier: Apache-2.0
 *
 * The range is as long as was asked, in whole pages, between two pages without access, and not passed on to children
 * (fork), who could only get copies of it. It costs addresses only until a part is committed: then all its pages exist,
 * on huge pages where the system gives them, on the wanted NUMA nodes as long as these have room. Committed memory that
 * was not committed before reads as zero. Memory that is not committed must not be touched.
 *
 * The memory is not page-locked: the device does that, on committed parts; unlock a part before it is decommitted. */
#ifndef GMI_RESERVE_H
#define GMI_RESERVE_H

#include <stdbool.h>
#include <stdint.h>

#include "gemini.h"
#include "host/topology.h"

typedef struct gmi_reserve gmi_reserve_t;

enum { GMI_RESERVE_SMALL_PAGES = 1 /* no huge pages: for parts smaller than one */ };

typedef struct gmi_reserve_config {
  uint64_t size_bytes;            /* not 0 */
  uint32_t flags;                 /* GMI_RESERVE_* */
  uint32_t threads;               /* that touch memory first; 0 = as many cores as the process may use, at most 64 */
  const gmi_topology_t *topology; /* NULL: not bound; borrowed until return */
  const uint32_t *nodes;          /* node_count indices of NUMA nodes in topology; borrowed until return */
  uint32_t node_count;            /* 0: not bound */
  uint32_t reserved;
  const char *root; /* put before the paths of system files: "" or NULL, or a test's directory; borrowed until return */
} gmi_reserve_config_t;

typedef struct gmi_reserve_figures {
  uint64_t size_bytes;      /* of the range, whole pages */
  uint64_t committed_bytes; /* what it is allowed to hold */
  uint64_t resident_bytes;  /* what it does hold, by /proc/self/smaps */
  uint64_t huge_bytes;      /* of these, on huge pages */
  uint64_t grain_bytes;
  bool bound;
  char note[240]; /* why it is not on huge pages or not bound, for the log; "" when there is nothing to say */
} gmi_reserve_figures_t;

/* OOM_HOST: the system has no addresses for size_bytes; OOM_SYSTEM: no memory for records.
 * That huge pages or the binding are refused is no failure: figures have the reason. */
gemini_status_t gmi_reserve_open(const gmi_reserve_config_t *config, gmi_reserve_t **reserve_out);
void gmi_reserve_close(gmi_reserve_t *reserve); /* NULL is accepted */

uint8_t *gmi_reserve_base(
    const gmi_reserve_t *reserve); /* aligned to a huge page where they are used, to 64 KiB at least */
uint64_t gmi_reserve_size(const gmi_reserve_t *reserve);
/* Parts begin and end at multiples of this many bytes, or at the end of the range: a huge page, or a page. A huge page
 * of which only a part is given back would stay whole until the system runs short. */
uint64_t gmi_reserve_grain(const gmi_reserve_t *reserve);

/* Makes every page of a part exist. What was committed keeps its bytes. Large parts are touched by many threads.
 * OOM_HOST: the system promised or gave no memory; INVALID: no part of the range; nothing changed.
 * Threads: any; commits and decommits of one reserve come one after another. Blocks. */
gemini_status_t gmi_reserve_commit(gmi_reserve_t *reserve, uint64_t offset_bytes, uint64_t size_bytes);
/* Gives a part's pages back; bytes are lost. What was not committed is passed over.
 * IO: the system refused (a part is locked); the pages stay committed. */
gemini_status_t gmi_reserve_decommit(gmi_reserve_t *reserve, uint64_t offset_bytes, uint64_t size_bytes);

/* Reads /proc/self/smaps: milliseconds in a large process. IO: it cannot be read. */
gemini_status_t gmi_reserve_figures(gmi_reserve_t *reserve, gmi_reserve_figures_t *figures_out);

#endif

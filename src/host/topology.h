/* The machine's NUMA nodes, GPUs and disks, and the distances between them. SPDX-License-Identifier: Apache-2.0
 *
 * A topology does not change once it is loaded. Threads: any; during gmi_topology_free() no other call may run. */
#ifndef GMI_TOPOLOGY_H
#define GMI_TOPOLOGY_H

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gemini.h"
#include "gemini/topology.h"

enum { GMI_HANDLE_TOPOLOGY = 6 }; /* beside those of core/manager.h */

typedef struct gmi_topology gmi_topology_t;

/* path: as for gemini_topology_open(). This call blocks for tens of milliseconds on a large machine. */
gemini_status_t gmi_topology_load(const char *path, gmi_topology_t **topology_out);
void gmi_topology_free(gmi_topology_t *topology); /* NULL is accepted */

/* The public functions of the same names, for a topology without a handle. */
uint32_t gmi_topology_count(const gmi_topology_t *topology, uint32_t kind);
gemini_status_t gmi_topology_object(const gmi_topology_t *topology, uint32_t kind, uint32_t index,
                                    gemini_topology_object_t *object_out);
gemini_status_t gmi_topology_distance(const gmi_topology_t *topology, uint32_t kind, uint32_t index,
                                      uint32_t other_kind, uint32_t other_index, uint32_t *distance_out);
gemini_status_t gmi_topology_nearest(const gmi_topology_t *topology, uint32_t kind, uint32_t index,
                                     uint32_t wanted_kind, uint32_t *index_out);

/* The GPU at this PCI address; GEMINI_INDEX_NONE: there is none. */
uint32_t gmi_topology_gpu_at(const gmi_topology_t *topology, const char *pci);
/* The disks that the block device major:minor consists of. root is prefixed to /sys and /proc: "", or a test's
 * directory. */
gemini_status_t gmi_topology_disks_of(const gmi_topology_t *topology, const char *root, uint32_t major_number,
                                      uint32_t minor_number, uint32_t *disks_out, uint32_t capacity,
                                      uint32_t *count_out);
/* The node that is nearest to all of these disks; GEMINI_INDEX_NONE: they have different ones. */
uint32_t gmi_topology_node_of(const gmi_topology_t *topology, const uint32_t *disks, uint32_t count);

/* Makes pages of a range that do not exist yet come from these nodes, or from others when these are full. False: the
 * system refuses, or the topology is not this machine's; reason says why. */
bool gmi_topology_bind(const gmi_topology_t *topology, void *begin, uint64_t size_bytes, const uint32_t *nodes,
                       uint32_t node_count, char *reason, size_t reason_size);
/* The processors of these nodes. False: they have none, one has a number that cpu_set_t cannot hold, or the topology is
 * not this machine's. */
bool gmi_topology_cpus(const gmi_topology_t *topology, const uint32_t *nodes, uint32_t node_count, cpu_set_t *cpus_out);

#endif

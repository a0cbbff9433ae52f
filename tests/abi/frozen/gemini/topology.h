/* libgemini: the NUMA nodes, GPUs and disks of a machine.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Its words and conventions are those of gemini.h. */
#ifndef GEMINI_TOPOLOGY_H
#define GEMINI_TOPOLOGY_H

#include <gemini.h>

#ifdef __cplusplus
extern "C" {
#endif

/** @defgroup topology Topology
 *  What a machine is made of, as far as it matters to where bytes live: NUMA nodes, GPUs and disks, and which are near
 *  each other. Objects of each kind are numbered from 0. A topology is read once and does not change.
 *  @{ */
typedef struct gemini_topology_s *gemini_topology_t;

enum {
  GEMINI_OBJECT_NODE = 0, /* NUMA node: memory and the processors next to it */
  GEMINI_OBJECT_GPU = 1,
  GEMINI_OBJECT_DISK = 2, /* whole disk, or namespace of an NVMe drive */
  GEMINI_OBJECT_COUNT = 3
};
/** How near two objects are: a smaller value is nearer. */
enum {
  GEMINI_DISTANCE_SAME = 0,    /* the same object, or two of one device */
  GEMINI_DISTANCE_SWITCH = 1,  /* below one PCI switch: bytes need not pass the processor */
  GEMINI_DISTANCE_BRIDGE = 2,  /* below one PCI host bridge */
  GEMINI_DISTANCE_NODE = 3,    /* at one NUMA node */
  GEMINI_DISTANCE_PACKAGE = 4, /* at one processor package */
  GEMINI_DISTANCE_MACHINE = 5, /* at different packages */
  GEMINI_DISTANCE_UNKNOWN = 6  /* the system does not say where one of them is */
};

typedef struct gemini_topology_object_s {
  uint32_t struct_size;  /* bytes; set by GEMINI_TOPOLOGY_OBJECT_INIT; on return, bytes filled */
  uint32_t kind;         /* GEMINI_OBJECT_* */
  uint32_t system_index; /* nodes: the system's number for it; others: GEMINI_INDEX_NONE */
  uint32_t node;         /* index of the nearest node, of a node itself; GEMINI_INDEX_NONE: the system does not say */
  uint32_t cpus;         /* nodes: logical processors next to it */
  uint32_t reserved;
  uint64_t size_bytes; /* memory of a node, capacity of a disk; 0: not known */
  char pci[16];        /* GPUs and disks: "0000:17:00.0"; "" where there is none */
  char name[128];      /* "node0"; model of a GPU, or "vendor:device" as PCI numbers; "nvme0n1" */
} gemini_topology_object_t;
#define GEMINI_TOPOLOGY_OBJECT_INIT { sizeof(gemini_topology_object_t), 0, 0, 0, 0, 0, 0, "", "" }

/** Reads the topology of this machine, or a saved one.
 *  @param xml_path  NULL: this machine. Otherwise a file that hwloc wrote (lstopo machine.xml); borrowed until return
 *  @param topology_out  transferred to the caller; end with gemini_topology_close()
 *  @retval GEMINI_ERR_IO  the file cannot be read; native_code is errno
 *  @retval GEMINI_ERR_FORMAT  the file is no topology
 *  @retval GEMINI_ERR_UNSUPPORTED  the system does not describe this machine
 *  @retval GEMINI_ERR_INVALID  topology_out is NULL, or 64 topologies are open
 *  @retval GEMINI_ERR_OOM_SYSTEM  there is no memory for the records, or no process could be started to look at the
 *           file
 *  Blocks for some milliseconds. A forked child loads a file first, since a damaged file can end the process that loads
 *  it; that may take up to 10 s. No GPU driver is started. Since: 0.1 */
GEMINI_API gemini_status_t gemini_topology_open(const char *xml_path, gemini_topology_t *topology_out)
    GEMINI_MUST_CHECK;
/** Frees a topology. NULL is accepted.
 *  @retval GEMINI_ERR_HANDLE  there is no such topology
 *  Threads: no other call on this topology may run. Since: 0.1 */
GEMINI_API gemini_status_t gemini_topology_close(gemini_topology_t topology);
/** Returns how many objects of a kind there are.
 *  @param kind  GEMINI_OBJECT_*
 *  @retval GEMINI_ERR_INVALID  kind is out of range
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_topology_count(gemini_topology_t topology, uint32_t kind, uint32_t *count_out)
    GEMINI_MUST_CHECK;
/** Says what an object is.
 *  @param object_out  allocated by the caller, struct_size set; borrowed until return
 *  @retval GEMINI_ERR_INVALID  there is no such kind or index
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_topology_object(gemini_topology_t topology, uint32_t kind, uint32_t index,
                                                  gemini_topology_object_t *object_out) GEMINI_MUST_CHECK;
/** Returns how near two objects are. The order of the two does not matter.
 *  @param distance_out  GEMINI_DISTANCE_*
 *  @retval GEMINI_ERR_INVALID  there is no such kind or index
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_topology_distance(gemini_topology_t topology, uint32_t kind, uint32_t index,
                                                    uint32_t other_kind, uint32_t other_index, uint32_t *distance_out)
    GEMINI_MUST_CHECK;
/** Returns the object of wanted_kind that is nearest to an object, other than the object itself. Of several, it is the
 *  one with the lowest index. The node nearest to a node is that node. Of several nodes next to a GPU or disk, it is
 *  the first that has memory.
 *  @retval GEMINI_ERR_NOT_FOUND  there is none, or the system does not say
 *  @retval GEMINI_ERR_INVALID  there is no such kind or index
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_topology_nearest(gemini_topology_t topology, uint32_t kind, uint32_t index,
                                                   uint32_t wanted_kind, uint32_t *index_out) GEMINI_MUST_CHECK;
/** Returns the disks that hold a directory of this machine: several where a volume spans them (RAID, LVM, device
 *  mapper).
 *  @param path  directory or file; borrowed until return
 *  @param capacity  indices that disks_out has room for
 *  @param disks_out  receives the disks' indices, in ascending order
 *  @param count_out  how many of them were filled
 *  @param node_out  the node near all of them, GEMINI_INDEX_NONE if they have different ones; may be NULL
 *  @retval GEMINI_ERR_NOT_FOUND  the directory is on no disk of the topology (network, memory, overlay)
 *  @retval GEMINI_ERR_INVALID  capacity is too small (64 is always enough); the message says how many disks there are
 *  @retval GEMINI_ERR_IO  path cannot be looked up; native_code is errno
 *  @retval GEMINI_ERR_UNSUPPORTED  the topology is a saved one
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_topology_directory(gemini_topology_t topology, const char *path, uint32_t capacity,
                                                     uint32_t *disks_out, uint32_t *count_out, uint32_t *node_out)
    GEMINI_MUST_CHECK;
/** @} */

#ifdef __cplusplus
}
#endif
#endif

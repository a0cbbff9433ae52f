/* Topologies from hwloc: this machine's, or a saved one. SPDX-License-Identifier: Apache-2.0
 *
 * Loading copies nodes, GPUs and disks out of hwloc's tree into arrays, in the public form. The tree is kept for
 * finding common ancestors and for binding memory. Neither the arrays nor the tree change after loading, so queries
 * take no lock. All runs on the caller's thread; a saved file is tried in a child process first. */
#include "host/topology.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <hwloc.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/abi.h"
#include "base/fork.h"
#include "base/handle.h"
#include "base/status.h"

enum { DISKS_LIMIT = 64, STACK_LIMIT = 16 };

typedef struct {
  gemini_topology_object_t info;
  hwloc_obj_t obj;
  hwloc_const_nodeset_t near; /* nodes that it is local to, in hwloc's tree; NULL: unknown */
} object_t;

typedef struct {
  object_t *items;
  uint32_t count, capacity;
} objects_t;

struct gmi_topology {
  hwloc_topology_t hwloc;
  objects_t objects[GEMINI_OBJECT_COUNT];
};

static const char *const kind_names[GEMINI_OBJECT_COUNT] = { "NUMA node", "GPU", "disk" };

/* ---- loading */

static object_t *object_add(objects_t *objects, uint32_t kind, hwloc_obj_t obj) {
  if (objects->count == objects->capacity) {
    uint32_t capacity = objects->capacity ? objects->capacity * 2 : 8;
    object_t *items = realloc(objects->items, capacity * sizeof *items);
    if (!items) return NULL;
    objects->items = items;
    objects->capacity = capacity;
  }
  object_t *p = &objects->items[objects->count++];
  memset(p, 0, sizeof *p);
  p->obj = obj;
  p->info.struct_size = sizeof p->info;
  p->info.kind = kind;
  p->info.system_index = GEMINI_INDEX_NONE;
  p->info.node = GEMINI_INDEX_NONE;
  return p;
}

static uint32_t node_index(const gmi_topology_t *t, unsigned system_index) {
  const objects_t *nodes = &t->objects[GEMINI_OBJECT_NODE];
  for (uint32_t i = 0; i < nodes->count; i++)
    if (nodes->items[i].info.system_index == system_index) return i;
  return GEMINI_INDEX_NONE;
}

/* Sets the nodes that an I/O object is attached to, and its nearest node: the first of them that has memory, else the
 * first. */
static void object_locate(gmi_topology_t *t, object_t *p) {
  const objects_t *nodes = &t->objects[GEMINI_OBJECT_NODE];
  hwloc_obj_t at = hwloc_get_non_io_ancestor_obj(t->hwloc, p->obj);
  hwloc_const_nodeset_t all = hwloc_topology_get_topology_nodeset(t->hwloc);
  /* On a machine with several nodes, an object attached to the root is one whose place the firmware did not tell. */
  if (!at || !at->nodeset || (nodes->count > 1 && hwloc_bitmap_isincluded(all, at->nodeset))) return;
  p->near = at->nodeset;
  int n = -1;
  while ((n = hwloc_bitmap_next(at->nodeset, n)) >= 0) {
    uint32_t index = node_index(t, (unsigned)n);
    if (index == GEMINI_INDEX_NONE) continue;
    if (p->info.node == GEMINI_INDEX_NONE) p->info.node = index;
    if (!nodes->items[index].info.size_bytes) continue;
    p->info.node = index;
    return;
  }
}

static hwloc_obj_t pci_of(hwloc_obj_t obj) {
  while (obj && obj->type != HWLOC_OBJ_PCI_DEVICE) obj = obj->parent;
  return obj;
}

static void object_pci(object_t *p) {
  hwloc_obj_t pci = pci_of(p->obj);
  if (!pci) return;
  const struct hwloc_pcidev_attr_s *a = &pci->attr->pcidev;
  snprintf(p->info.pci, sizeof p->info.pci, "%04x:%02x:%02x.%x", a->domain, a->bus, a->dev, a->func);
}

/* A display controller or processing accelerator of NVIDIA, AMD or Intel. Other makers' displays are mostly those of
 * management controllers. */
static bool is_gpu(hwloc_obj_t obj) {
  const struct hwloc_pcidev_attr_s *a = &obj->attr->pcidev;
  bool maker = a->vendor_id == 0x10de || a->vendor_id == 0x1002 || a->vendor_id == 0x8086;
  return maker && (a->class_id >> 8 == 0x03 || a->class_id >> 8 == 0x12);
}

static bool is_disk(hwloc_obj_t obj) {
  if (obj->attr->osdev.type != HWLOC_OBJ_OSDEV_BLOCK) return false;
  return !obj->subtype || (strcmp(obj->subtype, "Tape") && strcmp(obj->subtype, "Removable Media Device"));
}

static gemini_status_t nodes_collect(gmi_topology_t *t) {
  hwloc_obj_t obj = NULL;
  while ((obj = hwloc_get_next_obj_by_type(t->hwloc, HWLOC_OBJ_NUMANODE, obj))) {
    object_t *p = object_add(&t->objects[GEMINI_OBJECT_NODE], GEMINI_OBJECT_NODE, obj);
    if (!p) return GEMINI_ERR_OOM_SYSTEM;
    int cpus = obj->cpuset ? hwloc_bitmap_weight(obj->cpuset) : 0;
    p->near = obj->nodeset;
    p->info.system_index = obj->os_index;
    p->info.node = t->objects[GEMINI_OBJECT_NODE].count - 1;
    p->info.cpus = cpus > 0 ? (uint32_t)cpus : 0;
    p->info.size_bytes = obj->attr->numanode.local_memory;
    snprintf(p->info.name, sizeof p->info.name, "node%u", obj->os_index);
  }
  return GEMINI_OK;
}

static gemini_status_t gpus_collect(gmi_topology_t *t) {
  hwloc_obj_t obj = NULL;
  while ((obj = hwloc_get_next_pcidev(t->hwloc, obj))) {
    if (!is_gpu(obj)) continue;
    object_t *p = object_add(&t->objects[GEMINI_OBJECT_GPU], GEMINI_OBJECT_GPU, obj);
    if (!p) return GEMINI_ERR_OOM_SYSTEM;
    const struct hwloc_pcidev_attr_s *a = &obj->attr->pcidev;
    if (obj->name) snprintf(p->info.name, sizeof p->info.name, "%s", obj->name);
    else snprintf(p->info.name, sizeof p->info.name, "%04x:%04x", a->vendor_id, a->device_id);
    object_pci(p);
    object_locate(t, p);
  }
  return GEMINI_OK;
}

static gemini_status_t disks_collect(gmi_topology_t *t) {
  hwloc_obj_t obj = NULL;
  while ((obj = hwloc_get_next_osdev(t->hwloc, obj))) {
    if (!is_disk(obj) || !obj->name) continue;
    object_t *p = object_add(&t->objects[GEMINI_OBJECT_DISK], GEMINI_OBJECT_DISK, obj);
    if (!p) return GEMINI_ERR_OOM_SYSTEM;
    snprintf(p->info.name, sizeof p->info.name, "%s", obj->name);
    const char *kib = hwloc_obj_get_info_by_name(obj, "Size");
    uint64_t size = kib ? strtoull(kib, NULL, 10) : 0;
    if (size <= UINT64_MAX >> 10) p->info.size_bytes = size << 10;
    object_pci(p);
    object_locate(t, p);
  }
  return GEMINI_OK;
}

/* A saved topology: the contents of its file, NUL-terminated. */
typedef struct {
  const char *path;
  char *bytes;
  size_t size; /* including the NUL */
} saved_t;

/* saved: NULL for this machine. */
static gemini_status_t hwloc_load(const saved_t *saved, hwloc_topology_t *hwloc_out) {
  /* These components start a GPU driver in this process, after which the process could not fork any more. */
  static const char *const unwanted[] = { "cuda", "nvml", "rsmi", "levelzero", "opencl", "gl" };
  hwloc_topology_t h;
  if (hwloc_topology_init(&h)) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, errno, "hwloc: %s", strerror(errno));
  for (size_t i = 0; i < sizeof unwanted / sizeof *unwanted; i++)
    hwloc_topology_set_components(h, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, unwanted[i]); /* may not be installed */
  gemini_status_t status = GEMINI_OK;
  if (hwloc_topology_set_io_types_filter(h, HWLOC_TYPE_FILTER_KEEP_IMPORTANT) ||
      (saved && hwloc_topology_set_xmlbuffer(h, saved->bytes, (int)saved->size)) || hwloc_topology_load(h)) {
    if (saved) status = gmi_fail(GEMINI_ERR_FORMAT, errno, "%s: hwloc cannot load it as a topology", saved->path);
    else status = gmi_fail(GEMINI_ERR_UNSUPPORTED, errno, "hwloc cannot read this machine: %s", strerror(errno));
    hwloc_topology_destroy(h);
    return status;
  }
  *hwloc_out = h;
  return GEMINI_OK;
}

static gemini_status_t load(const saved_t *saved, gmi_topology_t **topology_out) {
  gmi_topology_t *t = calloc(1, sizeof *t);
  if (!t) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a topology");
  gemini_status_t status = hwloc_load(saved, &t->hwloc);
  if (status) {
    free(t);
    return status;
  }
  status = nodes_collect(t);
  if (!status) status = gpus_collect(t);
  if (!status) status = disks_collect(t);
  if (status) {
    gmi_topology_free(t);
    return gmi_fail(status, ENOMEM, "no memory for a topology");
  }
  *topology_out = t;
  return GEMINI_OK;
}

/* ---- saved topologies
 *
 * hwloc trusts the contents of such a file: a damaged one can crash it. So a child process loads the file first, and
 * makes every query that the public functions can make. */
enum { SAVED_MOST = 64 << 20, CHILD_SECONDS = 10, CHILD_LOOK_MS = 20 };

static gemini_status_t saved_read(const char *path, saved_t *saved_out) {
  saved_t s = { .path = path };
  struct stat info;
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return gmi_fail(GEMINI_ERR_IO, errno, "%s: %s", path, strerror(errno));
  gemini_status_t status = GEMINI_OK;
  if (fstat(fd, &info)) status = gmi_fail(GEMINI_ERR_IO, errno, "%s: %s", path, strerror(errno));
  else if (!S_ISREG(info.st_mode) || info.st_size >= SAVED_MOST)
    status = gmi_fail(GEMINI_ERR_FORMAT, 0, "%s: a topology is a file of less than %d bytes", path, SAVED_MOST);
  else if (!(s.bytes = malloc((size_t)info.st_size + 1)))
    status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a topology");
  while (!status && s.size < (size_t)info.st_size) {
    ssize_t n = read(fd, s.bytes + s.size, (size_t)info.st_size - s.size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) status = gmi_fail(GEMINI_ERR_IO, errno, "%s: %s", path, strerror(errno));
    if (n <= 0) break;
    s.size += (size_t)n;
  }
  close(fd);
  if (status) {
    free(s.bytes);
    return status;
  }
  s.bytes[s.size++] = 0;
  *saved_out = s;
  return GEMINI_OK;
}

static void ask_everything(const gmi_topology_t *t) {
  gemini_topology_object_t object = GEMINI_TOPOLOGY_OBJECT_INIT;
  uint32_t answer;
  for (uint32_t k = 0; k < GEMINI_OBJECT_COUNT; k++) {
    for (uint32_t i = 0; i < gmi_topology_count(t, k); i++) {
      (void)gmi_topology_object(t, k, i, &object);
      for (uint32_t other = 0; other < GEMINI_OBJECT_COUNT; other++) {
        (void)gmi_topology_nearest(t, k, i, other, &answer);
        for (uint32_t j = 0; j < gmi_topology_count(t, other); j++)
          (void)gmi_topology_distance(t, k, i, other, j, &answer);
      }
    }
  }
}

/* The child's part. It must have no effects of its own: no output, no core dump, no signal handlers or atexit functions
 * of the program. alarm() ends it if hwloc hangs. */
static void child_load(const saved_t *saved, int answer) {
  static const int faults[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGALRM, SIGSYS, SIGTRAP };
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) signal(faults[i], SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  pthread_sigmask(SIG_SETMASK, &none, NULL);
  setrlimit(RLIMIT_CORE, &(struct rlimit){ 0, 0 });
  int nowhere = open("/dev/null", O_WRONLY);
  if (nowhere >= 0) (void)dup2(nowhere, STDERR_FILENO), (void)dup2(nowhere, STDOUT_FILENO);
  alarm(CHILD_SECONDS);
  gmi_topology_t *t;
  gemini_status_t status = load(saved, &t);
  if (!status) ask_everything(t);
  const char said = status == GEMINI_OK ? 'y' : 'n';
  (void)!write(answer, &said, 1);
  _exit(0);
}

/* Returns the child's answer, or 0 if the child ends without one. A process that another thread forks meanwhile
 * inherits the writing end of the pipe, so the pipe may stay open after the child has ended; waitpid() shows the end.
 * The child's alarm() bounds the wait. */
static char child_answer(pid_t child, int fd) {
  char said = 0;
  for (;;) {
    int reaped = waitpid(child, NULL, WNOHANG); /* before the pipe: what an ended child has said is in it */
    bool ended = reaped == child || (reaped < 0 && errno != EINTR); /* the program's own wait() may have reaped it */
    struct pollfd ready = { .fd = fd, .events = POLLIN };
    int events = poll(&ready, 1, ended ? 0 : CHILD_LOOK_MS);
    if (events > 0 ? read(fd, &said, 1) < 0 : events || !ended) continue;
    while (!ended && waitpid(child, NULL, 0) < 0 && errno == EINTR) continue;
    return said;
  }
}

/* Lets a child process try the file. The child answers with one byte; no byte means that it crashed. */
static gemini_status_t saved_check(const saved_t *saved) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC))
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, errno, "no pipe for a topology: %s", strerror(errno));
  pid_t child = fork();
  if (!child) child_load(saved, ends[1]);
  int error = child < 0 ? errno : 0;
  close(ends[1]);
  char said = child > 0 ? child_answer(child, ends[0]) : 0;
  close(ends[0]);
  if (error)
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, error, "no process could be started to look at %s: %s", saved->path,
                    strerror(error));
  if (said == 'y') return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_FORMAT, 0, "%s: hwloc %s", saved->path,
                  said ? "cannot load it as a topology" : "crashes when it loads this file: the file is damaged");
}

gemini_status_t gmi_topology_load(const char *path, gmi_topology_t **topology_out) {
  if (!path) return load(NULL, topology_out);
  saved_t saved;
  gemini_status_t status = saved_read(path, &saved);
  if (status) return status;
  status = saved_check(&saved);
  if (!status) status = load(&saved, topology_out);
  free(saved.bytes);
  return status;
}

void gmi_topology_free(gmi_topology_t *t) {
  if (!t) return;
  for (uint32_t i = 0; i < GEMINI_OBJECT_COUNT; i++) free(t->objects[i].items);
  hwloc_topology_destroy(t->hwloc);
  free(t);
}

/* ---- queries */

uint32_t gmi_topology_count(const gmi_topology_t *t, uint32_t kind) {
  return kind < GEMINI_OBJECT_COUNT ? t->objects[kind].count : 0;
}

static gemini_status_t kind_check(uint32_t kind) {
  if (kind < GEMINI_OBJECT_COUNT) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_INVALID, 0, "kind is %u, must be 0 to %d", kind, GEMINI_OBJECT_COUNT - 1);
}

static const object_t *object_get(const gmi_topology_t *t, uint32_t kind, uint32_t index) {
  if (kind_check(kind)) return NULL;
  if (index < t->objects[kind].count) return &t->objects[kind].items[index];
  gmi_fail(GEMINI_ERR_INVALID, 0, "there is no %s %u: there are %u", kind_names[kind], index, t->objects[kind].count);
  return NULL;
}

gemini_status_t gmi_topology_object(const gmi_topology_t *t, uint32_t kind, uint32_t index,
                                    gemini_topology_object_t *object_out) {
  const object_t *p = object_get(t, kind, index);
  if (!p) return GEMINI_ERR_INVALID;
  gemini_topology_object_t info = p->info;
  return gmi_struct_out(object_out, &info, sizeof info, GMI_V1_TOPOLOGY_OBJECT, "object_out");
}

/* Judged by the deepest common ancestor if that is an I/O object, else by the nodes and packages of the two. */
static uint32_t distance(const gmi_topology_t *t, const object_t *a, const object_t *b) {
  if (a == b) return GEMINI_DISTANCE_SAME;
  /* The deepest common ancestor. hwloc gives I/O objects no meaningful depth, so all pairs of ancestors are
   * compared. */
  hwloc_obj_t common = a->obj;
  for (; common; common = common->parent) {
    hwloc_obj_t up = b->obj;
    while (up && up != common) up = up->parent;
    if (up) break;
  }
  if (common && common->type == HWLOC_OBJ_PCI_DEVICE) return GEMINI_DISTANCE_SAME; /* two disks of one controller */
  if (common && common->type == HWLOC_OBJ_BRIDGE)
    return common->attr->bridge.upstream_type == HWLOC_OBJ_BRIDGE_HOST ? GEMINI_DISTANCE_BRIDGE
                                                                       : GEMINI_DISTANCE_SWITCH;
  if (!a->near || !b->near) return GEMINI_DISTANCE_UNKNOWN;
  if (hwloc_bitmap_intersects(a->near, b->near)) return GEMINI_DISTANCE_NODE;
  hwloc_obj_t package = hwloc_get_ancestor_obj_by_type(t->hwloc, HWLOC_OBJ_PACKAGE, a->obj);
  if (package && package == hwloc_get_ancestor_obj_by_type(t->hwloc, HWLOC_OBJ_PACKAGE, b->obj))
    return GEMINI_DISTANCE_PACKAGE;
  return GEMINI_DISTANCE_MACHINE;
}

gemini_status_t gmi_topology_distance(const gmi_topology_t *t, uint32_t kind, uint32_t index, uint32_t other_kind,
                                      uint32_t other_index, uint32_t *distance_out) {
  const object_t *a = object_get(t, kind, index), *b = a ? object_get(t, other_kind, other_index) : NULL;
  if (!b) return GEMINI_ERR_INVALID;
  if (!distance_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "distance_out is NULL");
  *distance_out = distance(t, a, b);
  return GEMINI_OK;
}

uint32_t gmi_topology_gpu_at(const gmi_topology_t *t, const char *pci) {
  for (uint32_t i = 0; i < t->objects[GEMINI_OBJECT_GPU].count; i++)
    if (!strcasecmp(t->objects[GEMINI_OBJECT_GPU].items[i].info.pci, pci)) return i;
  return GEMINI_INDEX_NONE;
}

gemini_status_t gmi_topology_nearest(const gmi_topology_t *t, uint32_t kind, uint32_t index, uint32_t wanted_kind,
                                     uint32_t *index_out) {
  const object_t *p = object_get(t, kind, index);
  if (!p || kind_check(wanted_kind)) return GEMINI_ERR_INVALID;
  if (!index_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "index_out is NULL");
  uint32_t best = GEMINI_INDEX_NONE, best_distance = GEMINI_DISTANCE_UNKNOWN;
  if (wanted_kind == GEMINI_OBJECT_NODE) best = p->info.node;
  for (uint32_t i = 0; wanted_kind != GEMINI_OBJECT_NODE && i < t->objects[wanted_kind].count; i++) {
    const object_t *other = &t->objects[wanted_kind].items[i];
    uint32_t d = other == p ? GEMINI_DISTANCE_UNKNOWN : distance(t, p, other);
    if (d >= best_distance) continue;
    best = i;
    best_distance = d;
  }
  if (best == GEMINI_INDEX_NONE)
    return gmi_fail(GEMINI_ERR_NOT_FOUND, 0, "%s %s: no %s is known to be near", kind_names[kind], p->info.name,
                    kind_names[wanted_kind]);
  *index_out = best;
  return GEMINI_OK;
}

/* ---- directories */

typedef struct {
  char names[DISKS_LIMIT][64];
  uint32_t count;
} leaves_t;

/* Collects the whole disks that a block device consists of. directory: the device's in sysfs. A partition's directory
 * lies in its disk's; a stacked device (dm, md) has links to its components in slaves/. STACK_LIMIT ends the recursion
 * in a broken tree. */
static void leaves_collect(const char *directory, uint32_t depth, leaves_t *leaves) {
  char path[PATH_MAX], real[PATH_MAX];
  if (depth > STACK_LIMIT || !realpath(directory, real)) return;
  int length = snprintf(path, sizeof path, "%s/partition", real);
  if (length > 0 && (size_t)length < sizeof path && !access(path, F_OK)) *strrchr(real, '/') = 0;
  length = snprintf(path, sizeof path, "%s/slaves", real);
  DIR *slaves = length > 0 && (size_t)length < sizeof path ? opendir(path) : NULL;
  bool stacked = false;
  for (struct dirent *entry; slaves && (entry = readdir(slaves));) {
    if (entry->d_name[0] == '.') continue;
    stacked = true;
    length = snprintf(path, sizeof path, "%s/slaves/%s", real, entry->d_name);
    if (length > 0 && (size_t)length < sizeof path) leaves_collect(path, depth + 1, leaves);
  }
  if (slaves) closedir(slaves);
  if (stacked || leaves->count == DISKS_LIMIT) return;
  const char *name = strrchr(real, '/') + 1;
  for (uint32_t i = 0; i < leaves->count; i++)
    if (!strcmp(leaves->names[i], name)) return;
  length = snprintf(leaves->names[leaves->count], sizeof *leaves->names, "%s", name);
  if (length > 0 && (size_t)length < sizeof *leaves->names) leaves->count++;
}

/* The name of the block device that a file system was mounted from, by the mount table. Some file systems (btrfs)
 * report device numbers of their own, which no block device has. */
static bool mount_source(const char *root, uint32_t major_number, uint32_t minor_number, char *name, size_t size) {
  char path[PATH_MAX], source[PATH_MAX], wanted[32], *line = NULL;
  size_t capacity = 0;
  bool found = false;
  snprintf(wanted, sizeof wanted, "%u:%u", major_number, minor_number);
  int length = snprintf(path, sizeof path, "%s/proc/self/mountinfo", root);
  FILE *file = length > 0 && (size_t)length < sizeof path ? fopen(path, "re") : NULL;
  while (file && !found && getline(&line, &capacity, file) >= 0) {
    char device[32];
    const char *tail = strstr(line, " - ");
    if (!tail || sscanf(line, "%*s %*s %31s", device) != 1 || strcmp(device, wanted)) continue;
    if (sscanf(tail, " - %*s %4000s", source) != 1 || strncmp(source, "/dev/", 5)) continue;
    length = snprintf(path, sizeof path, "%s%s", root, source);
    if (length <= 0 || (size_t)length >= sizeof path || !realpath(path, source)) continue; /* /dev/mapper/x is a link */
    length = snprintf(name, size, "%s", strrchr(source, '/') + 1);
    found = length > 0 && (size_t)length < size;
  }
  free(line);
  if (file) fclose(file);
  return found;
}

gemini_status_t gmi_topology_disks_of(const gmi_topology_t *t, const char *root, uint32_t major_number,
                                      uint32_t minor_number, uint32_t *disks_out, uint32_t capacity,
                                      uint32_t *count_out) {
  char directory[PATH_MAX], name[256];
  leaves_t leaves = { .count = 0 };
  int length = snprintf(directory, sizeof directory, "%s/sys/dev/block/%u:%u", root, major_number, minor_number);
  if (length > 0 && (size_t)length < sizeof directory && access(directory, F_OK) &&
      mount_source(root, major_number, minor_number, name, sizeof name))
    length = snprintf(directory, sizeof directory, "%s/sys/class/block/%s", root, name);
  if (length > 0 && (size_t)length < sizeof directory) leaves_collect(directory, 0, &leaves);
  uint32_t disks[DISKS_LIMIT], count = 0;
  const objects_t *objects = &t->objects[GEMINI_OBJECT_DISK];
  for (uint32_t k = 0; k < objects->count && count < DISKS_LIMIT; k++)
    for (uint32_t i = 0; i < leaves.count; i++)
      if (!strcmp(objects->items[k].info.name, leaves.names[i])) disks[count++] = k;
  if (!count)
    return gmi_fail(GEMINI_ERR_NOT_FOUND, 0, "block device %u:%u (%s): no disk of this topology is below it",
                    major_number, minor_number, leaves.count ? leaves.names[0] : "unknown to the system");
  if (count > capacity) return gmi_fail(GEMINI_ERR_INVALID, 0, "capacity is %u, there are %u disks", capacity, count);
  memcpy(disks_out, disks, count * sizeof *disks);
  *count_out = count;
  return GEMINI_OK;
}

uint32_t gmi_topology_node_of(const gmi_topology_t *t, const uint32_t *disks, uint32_t count) {
  uint32_t node = GEMINI_INDEX_NONE;
  for (uint32_t i = 0; i < count; i++) {
    uint32_t one = t->objects[GEMINI_OBJECT_DISK].items[disks[i]].info.node;
    if (i && one != node) return GEMINI_INDEX_NONE;
    node = one;
  }
  return node;
}

/* ---- memory and processors */

/* The set of the nodes' system numbers; NULL: an index is out of range, or there is no memory. */
static hwloc_nodeset_t nodeset_make(const gmi_topology_t *t, const uint32_t *nodes, uint32_t node_count) {
  hwloc_nodeset_t set = hwloc_bitmap_alloc();
  for (uint32_t i = 0; set && i < node_count; i++) {
    if (nodes[i] < t->objects[GEMINI_OBJECT_NODE].count &&
        !hwloc_bitmap_set(set, t->objects[GEMINI_OBJECT_NODE].items[nodes[i]].info.system_index))
      continue;
    hwloc_bitmap_free(set);
    set = NULL;
  }
  return set;
}

bool gmi_topology_bind(const gmi_topology_t *t, void *begin, uint64_t size_bytes, const uint32_t *nodes,
                       uint32_t node_count, char *reason, size_t reason_size) {
  /* For a topology of another machine hwloc reports success without binding. */
  if (!hwloc_topology_is_thissystem(t->hwloc)) {
    snprintf(reason, reason_size, "the topology is a saved one, not this machine's");
    return false;
  }
  hwloc_nodeset_t set = nodeset_make(t, nodes, node_count);
  if (!set) {
    snprintf(reason, reason_size, "a node's index is out of range, or memory is short");
    return false;
  }
  /* Not HWLOC_MEMBIND_STRICT: with strict binding the kernel kills the process when the nodes are full. */
  bool ok = !hwloc_set_area_membind(t->hwloc, begin, size_bytes, set, HWLOC_MEMBIND_BIND, HWLOC_MEMBIND_BYNODESET);
  if (!ok) snprintf(reason, reason_size, "%s", strerror(errno));
  hwloc_bitmap_free(set);
  return ok;
}

bool gmi_topology_cpus(const gmi_topology_t *t, const uint32_t *nodes, uint32_t node_count, cpu_set_t *cpus_out) {
  CPU_ZERO(cpus_out);
  if (!hwloc_topology_is_thissystem(t->hwloc)) return false;
  for (uint32_t i = 0; i < node_count; i++) {
    if (nodes[i] >= t->objects[GEMINI_OBJECT_NODE].count) return false;
    hwloc_obj_t obj = t->objects[GEMINI_OBJECT_NODE].items[nodes[i]].obj;
    for (int cpu = -1; obj->cpuset && (cpu = hwloc_bitmap_next(obj->cpuset, cpu)) >= 0;) {
      if (cpu >= CPU_SETSIZE) return false;
      CPU_SET((unsigned)cpu, cpus_out);
    }
  }
  return CPU_COUNT(cpus_out) > 0;
}

/* ---- handles: bits [63:60] type, [59:8] generation, [7:0] entry in live[]. The generation makes each handle unique,
 * so that one of a closed topology is recognised although its entry is used again. */

enum { ENTRIES = 64 };
static struct {
  /* Atomic: the id of its handle; 0: free, so that the handle of a closed topology never matches. Stored with release
   * after topology; pairs with the acquire load in topology_get(), which then reads the topology that belongs to the
   * handle, without the lock. Closing while another call uses the handle is the caller's error. */
  _Atomic uint64_t id;
  gmi_topology_t *topology;
} live[ENTRIES];
static pthread_mutex_t live_lock = PTHREAD_MUTEX_INITIALIZER; /* held to open and close; innermost */
static uint64_t live_generation;                              /* Guarded by live_lock */

static gmi_topology_t *topology_get(gemini_topology_t handle) {
  uint64_t id = gmi_id(handle);
  uint32_t entry = (uint32_t)id & 255;
  if (id && entry < ENTRIES && atomic_load_explicit(&live[entry].id, memory_order_acquire) == id)
    return live[entry].topology;
  gmi_fail(GEMINI_ERR_HANDLE, 0, "%#" PRIx64 " is no open topology", id);
  return NULL;
}

/* A forked child keeps its parent's topologies, as they are nothing but memory. Only the lock needs care: fork() waits
 * for its holder, and the child makes it anew. */
static void fork_prepare(void) { pthread_mutex_lock(&live_lock); }
static void fork_parent(void) { pthread_mutex_unlock(&live_lock); }
static void fork_child(void) { pthread_mutex_init(&live_lock, NULL); }
static const gmi_fork_ops_t fork_ops = { fork_prepare, fork_parent, fork_child };

static gemini_status_t topology_open(const char *path, gemini_topology_t *topology_out) {
  if (!topology_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "topology_out is NULL");
  gmi_fork_watch(&fork_ops);
  gmi_topology_t *t;
  gemini_status_t status = gmi_topology_load(path, &t);
  if (status) return status;
  pthread_mutex_lock(&live_lock);
  uint32_t entry = 0;
  while (entry < ENTRIES && live[entry].topology) entry++;
  uint64_t id = (uint64_t)GMI_HANDLE_TOPOLOGY << 60 | ++live_generation << 8 | entry;
  if (entry < ENTRIES) {
    live[entry].topology = t;
    atomic_store_explicit(&live[entry].id, id, memory_order_release);
  }
  pthread_mutex_unlock(&live_lock);
  if (entry == ENTRIES) {
    gmi_topology_free(t);
    return gmi_fail(GEMINI_ERR_INVALID, 0, "%d topologies are open, the limit is %d", ENTRIES, ENTRIES);
  }
  *topology_out = gmi_handle_of(id);
  return GEMINI_OK;
}
gemini_status_t gemini_topology_open(const char *xml_path, gemini_topology_t *topology_out) {
  API_RETURN(topology_open(xml_path, topology_out));
}

static gemini_status_t topology_close(gemini_topology_t handle) {
  if (!handle) return GEMINI_OK;
  pthread_mutex_lock(&live_lock); /* of two threads that close the same handle, one succeeds */
  gmi_topology_t *t = topology_get(handle);
  if (t) {
    atomic_store_explicit(&live[gmi_id(handle) & 255].id, 0, memory_order_release);
    live[gmi_id(handle) & 255].topology = NULL;
  }
  pthread_mutex_unlock(&live_lock);
  gmi_topology_free(t);
  return t ? GEMINI_OK : GEMINI_ERR_HANDLE;
}
gemini_status_t gemini_topology_close(gemini_topology_t topology) { API_RETURN(topology_close(topology)); }

static gemini_status_t topology_count(gemini_topology_t topology, uint32_t kind, uint32_t *count_out) {
  const gmi_topology_t *t = topology_get(topology);
  if (!t) return GEMINI_ERR_HANDLE;
  if (!count_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "count_out is NULL");
  gemini_status_t status = kind_check(kind);
  if (!status) *count_out = gmi_topology_count(t, kind);
  return status;
}
gemini_status_t gemini_topology_count(gemini_topology_t topology, uint32_t kind, uint32_t *count_out) {
  API_RETURN(topology_count(topology, kind, count_out));
}

gemini_status_t gemini_topology_object(gemini_topology_t topology, uint32_t kind, uint32_t index,
                                       gemini_topology_object_t *object_out) {
  const gmi_topology_t *t = topology_get(topology);
  API_RETURN(t ? gmi_topology_object(t, kind, index, object_out) : GEMINI_ERR_HANDLE);
}

gemini_status_t gemini_topology_distance(gemini_topology_t topology, uint32_t kind, uint32_t index, uint32_t other_kind,
                                         uint32_t other_index, uint32_t *distance_out) {
  const gmi_topology_t *t = topology_get(topology);
  API_RETURN(t ? gmi_topology_distance(t, kind, index, other_kind, other_index, distance_out) : GEMINI_ERR_HANDLE);
}

gemini_status_t gemini_topology_nearest(gemini_topology_t topology, uint32_t kind, uint32_t index, uint32_t wanted_kind,
                                        uint32_t *index_out) {
  const gmi_topology_t *t = topology_get(topology);
  API_RETURN(t ? gmi_topology_nearest(t, kind, index, wanted_kind, index_out) : GEMINI_ERR_HANDLE);
}

static gemini_status_t topology_directory(gemini_topology_t topology, const char *path, uint32_t capacity,
                                          uint32_t *disks_out, uint32_t *count_out, uint32_t *node_out) {
  const gmi_topology_t *t = topology_get(topology);
  if (!t) return GEMINI_ERR_HANDLE;
  if (!path || !disks_out || !count_out)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "%s is NULL", !path ? "path" : !disks_out ? "disks_out" : "count_out");
  if (!hwloc_topology_is_thissystem(t->hwloc))
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0,
                    "%s: the topology was loaded from a file, but directories are those of this machine", path);
  struct stat st;
  if (stat(path, &st)) return gmi_fail(GEMINI_ERR_IO, errno, "%s: %s", path, strerror(errno));
  gemini_status_t status =
      gmi_topology_disks_of(t, "", major(st.st_dev), minor(st.st_dev), disks_out, capacity, count_out);
  if (status) gmi_fail_prefix("%s: ", path);
  else if (node_out) *node_out = gmi_topology_node_of(t, disks_out, *count_out);
  return status;
}
gemini_status_t gemini_topology_directory(gemini_topology_t topology, const char *path, uint32_t capacity,
                                          uint32_t *disks_out, uint32_t *count_out, uint32_t *node_out) {
  API_RETURN(topology_directory(topology, path, capacity, disks_out, count_out, node_out));
}

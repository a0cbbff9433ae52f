/* Topologies: saved ones of machines that nobody here owns, and this machine's. SPDX-License-Identifier: Apache-2.0
 *
 * The files of tests/data/topology were made by us: hwloc exported synthetic machines (their SyntheticDescription says
 * which: hwloc_topology_set_synthetic(), hwloc_topology_export_xml()), and bridges, devices and disks were written in
 * by hand, in the shape that hwloc gives to real ones.
 *   two_sockets  eight GPUs, nine NVMe drives, two SATA disks, a management display, and an NVMe drive (nvme8n1) whose
 *                place the firmware does not tell
 *   four_nodes   two packages of two NUMA nodes each; a drive at a package, not at one of its nodes
 *   one_node     one GPU, one NVMe and one virtual disk, one persistent memory without PCI
 *   no_io        two sockets, no device at all */
#include <dlfcn.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "../check.h"
#include "../fork.h"
#include "../handles.h"
#include "gemini.h"
#include "gemini/topology.h"
#include "host/topology.h"

#define NODE GEMINI_OBJECT_NODE
#define GPU GEMINI_OBJECT_GPU
#define DISK GEMINI_OBJECT_DISK
#define NONE GEMINI_INDEX_NONE

/* --- helpers --- */

static void data_path(const char *name, char *path, size_t size) {
  const char *end = strrchr(__FILE__, '/');
  snprintf(path, size, "%.*s/../data/topology/%s.xml", end ? (int)(end - __FILE__) : 1, end ? __FILE__ : ".", name);
}

static gemini_topology_t saved(const char *name) {
  char path[1024];
  gemini_topology_t topology = 0;
  data_path(name, path, sizeof path);
  CHECK_EQ(gemini_topology_open(path, &topology), GEMINI_OK);
  CHECK(topology != 0);
  return topology;
}

static void done(gemini_topology_t topology) { CHECK_EQ(gemini_topology_close(topology), GEMINI_OK); }

static uint32_t count(gemini_topology_t topology, uint32_t kind) {
  uint32_t n = 12345;
  CHECK_EQ(gemini_topology_count(topology, kind, &n), GEMINI_OK);
  return n;
}

static gemini_topology_object_t object(gemini_topology_t topology, uint32_t kind, uint32_t index) {
  gemini_topology_object_t o = GEMINI_TOPOLOGY_OBJECT_INIT;
  CHECK_EQ(gemini_topology_object(topology, kind, index, &o), GEMINI_OK);
  CHECK_EQ(o.struct_size, sizeof o);
  CHECK_EQ(o.kind, kind);
  return o;
}

/* Disks by name, GPUs by PCI address. */
static uint32_t find(gemini_topology_t topology, uint32_t kind, const char *what) {
  for (uint32_t i = 0; i < count(topology, kind); i++) {
    gemini_topology_object_t o = object(topology, kind, i);
    if (!strcmp(kind == GPU ? o.pci : o.name, what)) return i;
  }
  fprintf(stderr, "no %s in the topology\n", what);
  exit(1);
}

static uint32_t distance(gemini_topology_t topology, uint32_t kind, uint32_t index, uint32_t other_kind,
                         uint32_t other_index) {
  uint32_t there = 99, back = 98;
  CHECK_EQ(gemini_topology_distance(topology, kind, index, other_kind, other_index, &there), GEMINI_OK);
  CHECK_EQ(gemini_topology_distance(topology, other_kind, other_index, kind, index, &back), GEMINI_OK);
  CHECK_EQ(there, back);
  return there;
}

static uint32_t nearest(gemini_topology_t topology, uint32_t kind, uint32_t index, uint32_t wanted) {
  uint32_t found = 99;
  CHECK_EQ(gemini_topology_nearest(topology, kind, index, wanted, &found), GEMINI_OK);
  return found;
}

static const char *message(void) {
  static gemini_error_info_t info;
  info = (gemini_error_info_t)GEMINI_ERROR_INFO_INIT;
  CHECK_EQ(gemini_last_error(&info), GEMINI_OK);
  return info.message;
}

/* --- saved machines --- */

static void test_two_sockets_objects_are_as_written(void) {
  gemini_topology_t t = saved("two_sockets");
  CHECK_EQ(count(t, NODE), 2);
  CHECK_EQ(count(t, GPU), 8);   /* the management display is none */
  CHECK_EQ(count(t, DISK), 11); /* the optical drive is none */
  for (uint32_t i = 0; i < 2; i++) {
    gemini_topology_object_t node = object(t, NODE, i);
    CHECK_EQ(node.system_index, i);
    CHECK_EQ(node.node, i);
    CHECK_EQ(node.cpus, 4);
    CHECK_EQ(node.size_bytes, UINT64_C(512) << 30);
    CHECK(!strcmp(node.name, i ? "node1" : "node0"));
    CHECK(!node.pci[0]);
  }
  for (uint32_t i = 0; i < 8; i++) {
    gemini_topology_object_t gpu = object(t, GPU, i);
    CHECK(!strcmp(gpu.name, "NVIDIA GH100 [H100 SXM5 80GB]"));
    CHECK_EQ(gpu.node, i / 4);
    CHECK_EQ(gpu.system_index, NONE);
  }
  CHECK(!strcmp(object(t, GPU, 0).pci, "0000:12:00.0"));
  CHECK(!strcmp(object(t, GPU, 7).pci, "0000:a5:00.0"));
  for (uint32_t i = 0; i < 8; i++) {
    char name[16];
    snprintf(name, sizeof name, "nvme%un1", i);
    gemini_topology_object_t disk = object(t, DISK, find(t, DISK, name));
    CHECK_EQ(disk.node, i / 4);
    CHECK_EQ(disk.size_bytes, (i % 4 == 3 ? UINT64_C(7501476528) : UINT64_C(3750738264)) * 1024);
  }
  CHECK(!strcmp(object(t, DISK, find(t, DISK, "nvme4n1")).pci, "0000:94:00.0"));
  CHECK_EQ(object(t, DISK, find(t, DISK, "nvme8n1")).node, NONE);
  done(t);
}

static void test_two_sockets_distances_follow_the_tree(void) {
  gemini_topology_t t = saved("two_sockets");
  uint32_t gpu = find(t, GPU, "0000:12:00.0");
  const struct {
    uint32_t kind;
    const char *what;
    uint32_t distance;
  } others[] = {
    { GPU, "0000:12:00.0", GEMINI_DISTANCE_SAME }, { GPU, "0000:13:00.0", GEMINI_DISTANCE_SWITCH },
    { GPU, "0000:25:00.0", GEMINI_DISTANCE_NODE }, { GPU, "0000:a5:00.0", GEMINI_DISTANCE_MACHINE },
    { DISK, "nvme0n1", GEMINI_DISTANCE_SWITCH },   { DISK, "nvme1n1", GEMINI_DISTANCE_NODE },
    { DISK, "nvme2n1", GEMINI_DISTANCE_NODE },     { DISK, "nvme4n1", GEMINI_DISTANCE_MACHINE },
    { DISK, "nvme8n1", GEMINI_DISTANCE_UNKNOWN },  { NODE, "node0", GEMINI_DISTANCE_NODE },
    { NODE, "node1", GEMINI_DISTANCE_MACHINE },
  };
  for (size_t i = 0; i < sizeof others / sizeof *others; i++)
    CHECK_EQ(distance(t, GPU, gpu, others[i].kind, find(t, others[i].kind, others[i].what)), others[i].distance);
  /* A switch below a switch: what it shares with the other GPU is the upper one. */
  CHECK_EQ(distance(t, GPU, find(t, GPU, "0000:23:00.0"), GPU, find(t, GPU, "0000:25:00.0")), GEMINI_DISTANCE_SWITCH);
  CHECK_EQ(distance(t, DISK, find(t, DISK, "nvme2n1"), DISK, find(t, DISK, "nvme3n1")), GEMINI_DISTANCE_BRIDGE);
  CHECK_EQ(distance(t, DISK, find(t, DISK, "sda"), DISK, find(t, DISK, "sdb")), GEMINI_DISTANCE_SAME);
  CHECK_EQ(distance(t, NODE, 0, NODE, 1), GEMINI_DISTANCE_MACHINE);
  CHECK_EQ(distance(t, NODE, 1, NODE, 1), GEMINI_DISTANCE_SAME);
  done(t);
}

static void test_two_sockets_nearest_is_the_first_of_the_nearest(void) {
  gemini_topology_t t = saved("two_sockets");
  CHECK_EQ(nearest(t, DISK, find(t, DISK, "nvme0n1"), GPU), find(t, GPU, "0000:12:00.0"));
  CHECK_EQ(nearest(t, DISK, find(t, DISK, "nvme5n1"), GPU), find(t, GPU, "0000:a3:00.0"));
  CHECK_EQ(nearest(t, DISK, find(t, DISK, "nvme7n1"), GPU), find(t, GPU, "0000:92:00.0"));
  CHECK_EQ(nearest(t, DISK, find(t, DISK, "nvme7n1"), DISK), find(t, DISK, "nvme6n1"));
  CHECK_EQ(nearest(t, GPU, find(t, GPU, "0000:25:00.0"), DISK), find(t, DISK, "nvme1n1"));
  CHECK_EQ(nearest(t, GPU, find(t, GPU, "0000:13:00.0"), GPU), find(t, GPU, "0000:12:00.0"));
  CHECK_EQ(nearest(t, GPU, 6, NODE), 1);
  CHECK_EQ(nearest(t, NODE, 1, GPU), 4);
  CHECK_EQ(nearest(t, NODE, 1, NODE), 1);
  uint32_t index = 77, lost = find(t, DISK, "nvme8n1");
  CHECK_EQ(gemini_topology_nearest(t, DISK, lost, NODE, &index), GEMINI_ERR_NOT_FOUND);
  CHECK_EQ(gemini_topology_nearest(t, DISK, lost, GPU, &index), GEMINI_ERR_NOT_FOUND);
  CHECK(strstr(message(), "nvme8n1") && strstr(message(), "GPU"));
  CHECK_EQ(index, 77);
  done(t);
}

static void test_four_nodes_know_package_and_machine_apart(void) {
  gemini_topology_t t = saved("four_nodes");
  CHECK_EQ(count(t, NODE), 4);
  CHECK_EQ(distance(t, NODE, 0, NODE, 1), GEMINI_DISTANCE_PACKAGE);
  CHECK_EQ(distance(t, NODE, 1, NODE, 2), GEMINI_DISTANCE_MACHINE);
  CHECK_EQ(object(t, GPU, 0).node, 1);
  CHECK_EQ(distance(t, GPU, 0, NODE, 0), GEMINI_DISTANCE_PACKAGE);
  uint32_t at_package = find(t, DISK, "nvme0n1"), at_node = find(t, DISK, "nvme1n1");
  CHECK_EQ(object(t, DISK, at_package).node, 0); /* both nodes are as near: the first */
  CHECK_EQ(distance(t, DISK, at_package, NODE, 1), GEMINI_DISTANCE_NODE);
  CHECK_EQ(distance(t, DISK, at_package, NODE, 2), GEMINI_DISTANCE_MACHINE);
  CHECK_EQ(distance(t, DISK, at_package, GPU, 0), GEMINI_DISTANCE_NODE);
  CHECK_EQ(object(t, DISK, at_node).node, 2);
  CHECK_EQ(distance(t, DISK, at_node, GPU, 0), GEMINI_DISTANCE_MACHINE);
  CHECK_EQ(nearest(t, GPU, 0, DISK), at_package);
  done(t);
}

/* The machine of four_nodes, in which the first node has processors and no memory. */
static void test_node_without_memory_is_not_the_nearest(void) {
  static char text[1 << 20];
  char path[1024], changed[] = "/tmp/gemini_test_XXXXXX";
  data_path("four_nodes", path, sizeof path);
  FILE *file = fopen(path, "r");
  CHECK(file);
  size_t size = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  char *memory = strstr(text, "local_memory=\"");
  CHECK(memory && size < sizeof text - 1);
  for (char *digit = memory + strlen("local_memory=\""); *digit != '"'; digit++) *digit = '0';
  int fd = mkstemp(changed);
  CHECK(fd >= 0 && write(fd, text, size) == (ssize_t)size);
  close(fd);
  gemini_topology_t t = 0;
  CHECK_EQ(gemini_topology_open(changed, &t), GEMINI_OK);
  unlink(changed);
  CHECK_EQ(object(t, NODE, 0).size_bytes, 0);
  uint32_t at_package = find(t, DISK, "nvme0n1");
  CHECK_EQ(object(t, DISK, at_package).node, 1);
  CHECK_EQ(nearest(t, DISK, at_package, NODE), 1);
  CHECK_EQ(distance(t, DISK, at_package, NODE, 0), GEMINI_DISTANCE_NODE);
  done(t);
}

static void test_one_node_is_near_everything(void) {
  gemini_topology_t t = saved("one_node");
  CHECK_EQ(count(t, NODE), 1);
  CHECK_EQ(count(t, GPU), 1);
  CHECK_EQ(count(t, DISK), 3);
  CHECK_EQ(object(t, NODE, 0).cpus, 8);
  for (uint32_t i = 0; i < 3; i++) {
    CHECK_EQ(object(t, DISK, i).node, 0); /* also where the firmware tells nothing: there is no other */
    CHECK_EQ(distance(t, DISK, i, NODE, 0), GEMINI_DISTANCE_NODE);
  }
  CHECK_EQ(distance(t, GPU, 0, DISK, find(t, DISK, "vda")), GEMINI_DISTANCE_BRIDGE);
  CHECK_EQ(distance(t, GPU, 0, DISK, find(t, DISK, "pmem0")), GEMINI_DISTANCE_NODE);
  CHECK(!object(t, DISK, find(t, DISK, "pmem0")).pci[0]);
  done(t);
}

static void test_no_io_has_nodes_only(void) {
  gemini_topology_t t = saved("no_io");
  CHECK_EQ(count(t, NODE), 2);
  CHECK_EQ(count(t, GPU), 0);
  CHECK_EQ(count(t, DISK), 0);
  uint32_t index = 77;
  CHECK_EQ(gemini_topology_nearest(t, NODE, 0, GPU, &index), GEMINI_ERR_NOT_FOUND);
  CHECK_EQ(gemini_topology_nearest(t, GPU, 0, NODE, &index), GEMINI_ERR_INVALID);
  done(t);
}

/* --- misuse --- */

static void test_open_of_what_is_no_topology_is_refused(void) {
  gemini_topology_t t = handle_of(77);
  CHECK_EQ(gemini_topology_open("/nonexistent/machine.xml", &t), GEMINI_ERR_IO);
  CHECK(strstr(message(), "/nonexistent/machine.xml"));
  char path[] = "/tmp/gemini_test_XXXXXX";
  int fd = mkstemp(path);
  CHECK(fd >= 0 && write(fd, "<topology>nonsense", 18) == 18);
  close(fd);
  CHECK_EQ(gemini_topology_open(path, &t), GEMINI_ERR_FORMAT);
  CHECK(strstr(message(), path));
  unlink(path);
  CHECK_EQ(handle_id(t), 77);
  CHECK_EQ(gemini_topology_open(NULL, NULL), GEMINI_ERR_INVALID);
}

/* What hwloc's call does when dies is set: it ends its process. */
static bool dies, leaves_a_child; /* leaves_a_child: which has all its descriptors and lives on for 20 s */
int hwloc_topology_load(void *topology);
int hwloc_topology_load(void *topology) {
  if (dies && leaves_a_child && !fork()) {
    sleep(20);
    _exit(0);
  }
  if (dies) kill(getpid(), SIGSEGV);
  int (*real)(void *topology);
  void *address = dlsym(RTLD_NEXT, "hwloc_topology_load");
  CHECK(address);
  memcpy(&real, &address, sizeof real);
  return real(topology);
}

/* A saved topology that is damaged is refused, or loaded as far as it goes: the process goes on in either case. */
static void test_damaged_topology_ends_no_process(void) {
  static char text[1 << 16], damaged[1 << 16];
  char path[4096], changed[] = "/tmp/gemini_test_XXXXXX";
  data_path("two_sockets", path, sizeof path);
  FILE *file = fopen(path, "r");
  CHECK(file);
  size_t size = fread(text, 1, sizeof text - 1, file);
  CHECK(size && size < sizeof text - 1 && !fclose(file));
  int fd = mkstemp(changed), refused = 0;
  CHECK(fd >= 0);
  uint64_t random = 11;
  for (int round = 0; round < 150; round++) {
    memcpy(damaged, text, size);
    for (uint64_t k = round ? 1 + check_random(&random) % 3 : 0; k > 0; k--)
      damaged[check_random(&random) % size] = (char)(' ' + check_random(&random) % 95);
    size_t length = round % 10 == 9 ? check_random(&random) % size : size;
    CHECK(!ftruncate(fd, 0) && pwrite(fd, damaged, length, 0) == (ssize_t)length);
    gemini_topology_t t = handle_of(77);
    dies = round == 0;
    gemini_status_t status = gemini_topology_open(changed, &t);
    dies = false;
    CHECK(status == GEMINI_OK || status == GEMINI_ERR_FORMAT);
    CHECK(status || handle_id(t) != 77);
    if (!status) done(t);
    else CHECK(handle_id(t) == 77 && strstr(message(), changed));
    refused += status != GEMINI_OK;
    CHECK(round || status == GEMINI_ERR_FORMAT); /* the damage that hwloc does not survive, whichever version it is */
  }
  CHECK(refused > 15);
  CHECK(!close(fd) && !unlink(changed));
}

/* A process that inherited the pipe to the loading process outlives it. */
static void test_damaged_topology_does_not_wait_for_other_processes(void) {
  char path[4096];
  struct timespec before, after;
  data_path("one_node", path, sizeof path);
  gemini_topology_t t = handle_of(77);
  clock_gettime(CLOCK_MONOTONIC, &before);
  dies = leaves_a_child = true;
  CHECK_EQ(gemini_topology_open(path, &t), GEMINI_ERR_FORMAT);
  dies = leaves_a_child = false;
  clock_gettime(CLOCK_MONOTONIC, &after);
  CHECK(after.tv_sec - before.tv_sec < 15);
  done(saved("one_node"));
}

static void test_handles_and_indices_are_checked(void) {
  gemini_topology_t t = saved("no_io"), other = saved("one_node");
  uint32_t n = 77;
  gemini_topology_object_t o = GEMINI_TOPOLOGY_OBJECT_INIT;
  CHECK(t != other);
  CHECK_EQ(gemini_topology_count(t, GEMINI_OBJECT_COUNT, &n), GEMINI_ERR_INVALID);
  CHECK_EQ(gemini_topology_count(t, NODE, NULL), GEMINI_ERR_INVALID);
  CHECK_EQ(gemini_topology_object(t, NODE, 2, &o), GEMINI_ERR_INVALID);
  CHECK(strstr(message(), "NUMA node 2") && strstr(message(), "there are 2"));
  CHECK_EQ(gemini_topology_object(t, NODE, 0, NULL), GEMINI_ERR_INVALID);
  o.struct_size = 8;
  CHECK_EQ(gemini_topology_object(t, NODE, 0, &o), GEMINI_ERR_INVALID);
  CHECK_EQ(gemini_topology_distance(t, NODE, 0, NODE, 5, &n), GEMINI_ERR_INVALID);
  CHECK_EQ(gemini_topology_distance(t, NODE, 0, NODE, 1, NULL), GEMINI_ERR_INVALID);
  CHECK_EQ(gemini_topology_nearest(t, NODE, 0, 9, &n), GEMINI_ERR_INVALID);
  CHECK_EQ(gemini_topology_nearest(t, NODE, 0, NODE, NULL), GEMINI_ERR_INVALID);
  CHECK_EQ(n, 77);
  done(t);
  CHECK_EQ(gemini_topology_close(t), GEMINI_ERR_HANDLE);
  CHECK_EQ(gemini_topology_count(t, NODE, &n), GEMINI_ERR_HANDLE);
  CHECK_EQ(gemini_topology_close(0), GEMINI_OK);
  gemini_topology_t next = saved("no_io"); /* takes the place, but not the handle */
  CHECK(next != t);
  CHECK_EQ(gemini_topology_count(t, NODE, &n), GEMINI_ERR_HANDLE);
  CHECK_EQ(gemini_topology_count(handle_of(handle_id(t) ^ UINT64_C(0xff)), NODE, &n), GEMINI_ERR_HANDLE);
  done(next);
  CHECK_EQ(count(other, NODE), 1);
  done(other);
  gemini_topology_t many[64];
  for (int i = 0; i < 64; i++) many[i] = saved("no_io");
  char path[1024];
  data_path("no_io", path, sizeof path);
  CHECK_EQ(gemini_topology_open(path, &next), GEMINI_ERR_INVALID);
  CHECK(strstr(message(), "64"));
  for (int i = 0; i < 64; i++) done(many[i]);
}

static void test_saved_topology_knows_no_directories_and_binds_nothing(void) {
  gemini_topology_t t = saved("one_node");
  uint32_t disks[64], n = 77;
  CHECK_EQ(gemini_topology_directory(t, "/", 64, disks, &n, NULL), GEMINI_ERR_UNSUPPORTED);
  CHECK_EQ(gemini_topology_directory(t, NULL, 64, disks, &n, NULL), GEMINI_ERR_INVALID);
  done(t);
  char path[1024], reason[160] = "";
  data_path("one_node", path, sizeof path);
  gmi_topology_t *internal;
  CHECK_EQ(gmi_topology_load(path, &internal), GEMINI_OK);
  uint32_t node = 0;
  static char bytes[4096];
  CHECK(!gmi_topology_bind(internal, bytes, sizeof bytes, &node, 1, reason, sizeof reason));
  CHECK(strstr(reason, "saved"));
  gmi_topology_free(internal);
}

/* --- directories: a copy of the part of sysfs that is read --- */

static char tree[64];

static const char *at(const char *path) {
  static char full[4][1024];
  static int turn;
  char *one = full[turn++ % 4];
  snprintf(one, sizeof full[0], "%s/%s", tree, path);
  return one;
}

static void parents(const char *full) {
  char path[1024];
  snprintf(path, sizeof path, "%s", full);
  for (char *slash = strchr(path + strlen(tree) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = 0;
    mkdir(path, 0755);
    *slash = '/';
  }
}

static void file_put(const char *path, const char *text) {
  const char *full = at(path);
  parents(full);
  FILE *file = fopen(full, "w");
  CHECK(file && fputs(text, file) >= 0 && !fclose(file));
}

static void link_put(const char *path, const char *to) {
  const char *full = at(path);
  parents(full);
  CHECK_EQ(symlink(at(to), full), 0);
}

/* A block device in directory below sys/devices, found as number and by its name. */
static void device_put(const char *directory, const char *number) {
  char path[512], to[256];
  snprintf(to, sizeof to, "sys/devices/%s", directory);
  snprintf(path, sizeof path, "%s/dev", to);
  file_put(path, number);
  snprintf(path, sizeof path, "sys/dev/block/%s", number);
  link_put(path, to);
  snprintf(path, sizeof path, "sys/class/block/%s", strrchr(directory, '/') + 1);
  link_put(path, to);
}

static void expect_disks(const gmi_topology_t *t, uint32_t major_number, uint32_t minor_number, const char *names,
                         uint32_t node) {
  uint32_t disks[64], n = 77;
  char text[256] = "";
  CHECK_EQ(gmi_topology_disks_of(t, tree, major_number, minor_number, disks, 64, &n), GEMINI_OK);
  for (uint32_t i = 0; i < n; i++) {
    gemini_topology_object_t o = GEMINI_TOPOLOGY_OBJECT_INIT;
    CHECK_EQ(gmi_topology_object(t, DISK, disks[i], &o), GEMINI_OK);
    snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", i ? " " : "", o.name);
  }
  if (strcmp(text, names)) fprintf(stderr, "disks are \"%s\", expected \"%s\"\n", text, names);
  CHECK(!strcmp(text, names));
  CHECK_EQ(gmi_topology_node_of(t, disks, n), node);
}

static void test_block_devices_lead_to_their_disks(void) {
  snprintf(tree, sizeof tree, "/tmp/gemini_test_XXXXXX");
  CHECK(mkdtemp(tree));
  char path[1024];
  data_path("two_sockets", path, sizeof path);
  gmi_topology_t *t;
  CHECK_EQ(gmi_topology_load(path, &t), GEMINI_OK);
  device_put("pci0/nvme0n1", "259:0");
  device_put("pci0/nvme0n1/nvme0n1p2", "259:20");
  file_put("sys/devices/pci0/nvme0n1/nvme0n1p2/partition", "2\n");
  device_put("pci1/nvme1n1", "259:1");
  device_put("pci4/nvme4n1", "259:4");
  device_put("pci8/nvme8n1", "259:8");
  mkdir(at("sys/devices/pci0/nvme0n1/slaves"), 0755); /* every disk has the folder, empty */
  device_put("virtual/md127", "9:127");               /* a mirror of a partition and a disk at one socket */
  link_put("sys/devices/virtual/md127/slaves/nvme0n1p2", "sys/devices/pci0/nvme0n1/nvme0n1p2");
  link_put("sys/devices/virtual/md127/slaves/nvme1n1", "sys/devices/pci1/nvme1n1");
  device_put("virtual/dm-0", "252:0"); /* a volume over the mirror and a disk at the other socket */
  link_put("sys/devices/virtual/dm-0/slaves/md127", "sys/devices/virtual/md127");
  link_put("sys/devices/virtual/dm-0/slaves/nvme4n1", "sys/devices/pci4/nvme4n1");
  link_put("sys/devices/virtual/dm-0/slaves/nvme1n1", "sys/devices/pci1/nvme1n1");
  device_put("virtual/loop0", "7:0");
  device_put("virtual/dm-9", "252:9"); /* a ring, which no kernel makes */
  link_put("sys/devices/virtual/dm-9/slaves/dm-9", "sys/devices/virtual/dm-9");

  expect_disks(t, 259, 0, "nvme0n1", 0);
  expect_disks(t, 259, 20, "nvme0n1", 0);
  expect_disks(t, 259, 4, "nvme4n1", 1);
  expect_disks(t, 259, 8, "nvme8n1", NONE);
  expect_disks(t, 9, 127, "nvme0n1 nvme1n1", 0);
  expect_disks(t, 252, 0, "nvme0n1 nvme1n1 nvme4n1", NONE);
  uint32_t disks[64] = { 77 }, n = 77;
  CHECK_EQ(gmi_topology_disks_of(t, tree, 252, 0, disks, 2, &n), GEMINI_ERR_INVALID);
  CHECK(strstr(message(), "capacity is 2, there are 3"));
  CHECK_EQ(gmi_topology_disks_of(t, tree, 7, 0, disks, 64, &n), GEMINI_ERR_NOT_FOUND);
  CHECK(strstr(message(), "7:0") && strstr(message(), "loop0"));
  CHECK_EQ(gmi_topology_disks_of(t, tree, 252, 9, disks, 64, &n), GEMINI_ERR_NOT_FOUND);
  CHECK_EQ(gmi_topology_disks_of(t, tree, 1, 1, disks, 64, &n), GEMINI_ERR_NOT_FOUND);
  CHECK_EQ(disks[0], 77);
  CHECK_EQ(n, 77);

  /* File systems with device numbers of their own. */
  file_put("dev/dm-0", "");
  link_put("dev/mapper/fast-data", "dev/dm-0");
  file_put("proc/self/mountinfo", "22 1 0:21 / /proc rw - proc proc rw\n"
                                  "40 1 0:45 /sub /data rw,relatime shared:7 - btrfs /dev/mapper/fast-data rw,ssd\n"
                                  "41 1 0:46 / /over rw - overlay overlay rw,lowerdir=/dev/x\n");
  expect_disks(t, 0, 45, "nvme0n1 nvme1n1 nvme4n1", NONE);
  CHECK_EQ(gmi_topology_disks_of(t, tree, 0, 46, disks, 64, &n), GEMINI_ERR_NOT_FOUND);
  CHECK_EQ(gmi_topology_disks_of(t, tree, 0, 4, disks, 64, &n), GEMINI_ERR_NOT_FOUND);
  gmi_topology_free(t);
  char command[128];
  snprintf(command, sizeof command, "rm -rf '%s'", tree);
  CHECK_EQ(system(command), 0);
}

/* --- this machine --- */

static void test_this_machine_agrees_with_the_system(void) {
  gemini_topology_t t = 0;
  CHECK_EQ(gemini_topology_open(NULL, &t), GEMINI_OK);
  CHECK(count(t, NODE) >= 1);
  uint32_t cpus = 0;
  for (uint32_t i = 0; i < count(t, NODE); i++) cpus += object(t, NODE, i).cpus;
  CHECK(cpus >= 1 && cpus <= (uint32_t)sysconf(_SC_NPROCESSORS_CONF));
  CHECK(object(t, NODE, 0).size_bytes > 0);
  for (uint32_t i = 0; i < count(t, DISK); i++) {
    char path[256];
    snprintf(path, sizeof path, "/sys/class/block/%s/size", object(t, DISK, i).name);
    FILE *file = fopen(path, "r");
    unsigned long long sectors = 0;
    CHECK(file && fscanf(file, "%llu", &sectors) == 1);
    fclose(file);
    CHECK_EQ(object(t, DISK, i).size_bytes, sectors * 512 / 1024 * 1024);
  }
  uint32_t disks[64], n = 0, node = 77;
  gemini_status_t status = gemini_topology_directory(t, ".", 64, disks, &n, &node);
  if (status == GEMINI_OK) {
    CHECK(n >= 1);
    for (uint32_t i = 0; i < n; i++) CHECK(disks[i] < count(t, DISK));
    CHECK(node == NONE || node < count(t, NODE));
    fprintf(stderr, "    . is on %s\n", object(t, DISK, disks[0]).name);
  } else {
    CHECK_EQ(status, GEMINI_ERR_NOT_FOUND);
    fprintf(stderr, "    %s\n", message());
  }
  CHECK_EQ(gemini_topology_directory(t, "/proc", 64, disks, &n, &node), GEMINI_ERR_NOT_FOUND);
  CHECK(strstr(message(), "/proc"));
  CHECK_EQ(gemini_topology_directory(t, "/nonexistent", 64, disks, &n, &node), GEMINI_ERR_IO);
  done(t);
}

int main(void) {
  RUN(test_two_sockets_objects_are_as_written);
  RUN(test_two_sockets_distances_follow_the_tree);
  RUN(test_two_sockets_nearest_is_the_first_of_the_nearest);
  RUN(test_four_nodes_know_package_and_machine_apart);
  RUN(test_node_without_memory_is_not_the_nearest);
  RUN(test_one_node_is_near_everything);
  RUN(test_no_io_has_nodes_only);
  RUN(test_open_of_what_is_no_topology_is_refused);
  RUN(test_damaged_topology_ends_no_process);
  RUN(test_damaged_topology_does_not_wait_for_other_processes);
  RUN(test_handles_and_indices_are_checked);
  RUN(test_saved_topology_knows_no_directories_and_binds_nothing);
  RUN(test_block_devices_lead_to_their_disks);
  RUN(test_this_machine_agrees_with_the_system);
  return check_done();
}

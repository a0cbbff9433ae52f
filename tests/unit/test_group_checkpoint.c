/* Checkpoints of groups: saved by some ranks, loaded by others; ranks that are killed, or fail, or differ.
 * SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include "../fork.h"
#include "../integration/group_world.h"
#include "../process.h"
#include "chunk/files.h"
#include "io/index.h"

#define W WORLD_CHUNK
#define LONG_NS UINT64_C(60000000000) /* no test waits for it */
/* After a rank was killed, all others have an error within this time. */
#define LATEST_NS (SANITIZED ? UINT64_C(30000000000) : UINT64_C(10000000000))
enum { TENSORS = 4, KINDS = 3, EXTRA_SIZE = 2 * W + 1000, PROCESSES_MOST = 8 };
static char dir[64];

/* ---- system calls that fail, or at which a rank dies */
static _Atomic uint64_t calls; /* of this process, since it was set to 0 */
static uint64_t die_at;        /* SIGKILL at this call; 0: never */
static struct {
  _Atomic uint64_t calls, died_ns; /* of the rank that dies */
} *shared;                         /* by all processes */
static struct {
  const char *what; /* "fdatasync", "fallocate", "rename", "fsync", "pread"; NULL: none fails */
  int error;
  uint32_t after; /* so many go well before it */
} fails;

static bool lies, blinds; /* renaming to a root succeeds, and says that it failed; and then no root can be opened */
static bool blind;
static char second[400]; /* not "": takes the place of "run.index" when that is opened for the second time */
static int index_opens;
static char other_root[400]; /* not "": becomes "run.ranks" when a part's index takes its place */

static void call(void) {
  if (atomic_fetch_add(&calls, 1) + 1 != die_at) return;
  atomic_store(&shared->died_ns, now_ns());
  raise(SIGKILL);
}
static bool failing(const char *what) {
  if (!fails.what || strcmp(fails.what, what) != 0) return false;
  if (fails.after) return fails.after--, false;
  errno = fails.error;
  return true;
}
static int fault_open(const char *path, int flags, mode_t mode) {
  const bool counted = strstr(path, dir);
  if (counted) call();
  if (blind && strstr(path, "run.ranks")) return errno = EIO, -1;
  if (*second && strstr(path, "/run.index") && ++index_opens == 2) {
    CHECK_EQ(rename(second, path), 0);
    *second = 0;
  }
  int fd = gmi_sys_real.open(path, flags, mode);
  if (counted) call();
  return fd;
}
static int fault_fdatasync(int fd) {
  call();
  if (failing("fdatasync")) return -1;
  int result = gmi_sys_real.fdatasync(fd);
  call();
  return result;
}
static int fault_fsync(int fd) {
  call();
  if (failing("fsync")) return -1;
  int result = gmi_sys_real.fsync(fd);
  call();
  return result;
}
static int fault_rename(const char *from, const char *to) {
  call();
  if (failing("rename")) return -1;
  int result = gmi_sys_real.rename(from, to);
  call();
  if (*other_root && strstr(to, ".index")) {
    char root[400];
    snprintf(root, sizeof root, "%s/run.ranks", dir);
    CHECK_EQ(rename(other_root, root), 0);
    *other_root = 0;
  }
  if (lies && strstr(to, "run.ranks")) {
    blind = blinds;
    errno = ENOENT;
    return -1;
  }
  return result;
}
static int fault_unlink(const char *path) {
  call();
  int result = gmi_sys_real.unlink(path);
  call();
  return result;
}
static bool lockless; /* the file system has no locks */
static int fault_flock(int fd, int operation) {
  if (lockless) return errno = ENOLCK, -1;
  return gmi_sys_real.flock(fd, operation);
}
static int fault_fallocate(int fd, int mode, off_t offset, off_t size) {
  return failing("fallocate") ? -1 : gmi_sys_real.fallocate(fd, mode, offset, size);
}
static ssize_t fault_pread(int fd, void *buffer, size_t size, off_t offset) {
  return size >= W && failing("pread") ? -1 : gmi_sys_real.pread(fd, buffer, size, offset);
}
static gmi_sys_t fault_sys;

/* ---- files */
static int files_in_dir(void) {
  DIR *d = opendir(dir);
  int files = 0;
  CHECK(d);
  for (struct dirent *e; (e = readdir(d));) files += *e->d_name != '.';
  closedir(d);
  return files;
}
static void clear_dir(void) {
  DIR *d = opendir(dir);
  CHECK(d);
  for (struct dirent *e; (e = readdir(d));) {
    char path[400];
    if (*e->d_name == '.') continue;
    snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
    CHECK_EQ(unlink(path), 0);
  }
  closedir(d);
  CHECK_EQ(rmdir(dir), 0);
}
/* The first file whose name has this end. */
static void find_file(const char *end, char path_out[400]) {
  DIR *d = opendir(dir);
  bool found = false;
  CHECK(d);
  for (struct dirent *e; !found && (e = readdir(d));) {
    size_t length = strlen(e->d_name);
    found = length >= strlen(end) && !strcmp(e->d_name + length - strlen(end), end);
    if (found) snprintf(path_out, 400, "%s/%s", dir, e->d_name);
  }
  closedir(d);
  CHECK(found);
}
static void flip_byte(const char *path, off_t offset) {
  uint8_t byte;
  int fd = open(path, O_RDWR | O_CLOEXEC);
  CHECK(fd >= 0);
  CHECK_EQ(pread(fd, &byte, 1, offset), 1);
  byte ^= 0x20;
  CHECK_EQ(pwrite(fd, &byte, 1, offset), 1);
  close(fd);
}

/* ---- a rank: sharded parameters and masters, and an arena that every rank has whole */
typedef struct {
  uint32_t ranks, rank; /* ranks 0: no group, nothing is sharded */
  uint32_t shard_ranks;
  uint64_t chunk_bytes, host_chunks, file_chunks;
  uint64_t last_size; /* of the last tensor; 0: as usual */
  const char *last_name;
  bool another_arena, kept;
} node_shape_t;
typedef struct {
  node_shape_t shape;
  world_t w;
  gemini_group_t group;
  gemini_arena_t arenas[KINDS]; /* params, masters, extra */
  gemini_tensor_t tensors[KINDS][TENSORS];
} node_t;
static const uint64_t sizes[TENSORS] = { 3 * W + 1024, 512, 9 * W + 2048, 5 * W };

static char warning[400]; /* the last one of locks */
static void keep_warning(void *user, int32_t level, const char *text) {
  (void)user;
  (void)level;
  if (strstr(text, "has no locks")) snprintf(warning, sizeof warning, "%s", text);
}

static node_t node_open(const node_shape_t *shape, const gemini_group_id_t *id) {
  node_t n = { .shape = *shape };
  gemini_config_t c =
      world_config(64, shape->host_chunks ? shape->host_chunks : 128, shape->kept ? 200 : shape->file_chunks);
  if (shape->chunk_bytes) c.chunk_bytes = shape->chunk_bytes;
  c.log_fn = keep_warning;
  c.log_level = GEMINI_LOG_WARNING;
  if (shape->kept) {
    c.file_dir = dir;
    c.checkpoint_name = "run";
  }
  n.w = world_open(c);
  if (shape->ranks) {
    gemini_group_config_t group = GEMINI_GROUP_CONFIG_INIT;
    group.id = id;
    group.rank = shape->rank;
    group.ranks = shape->ranks;
    group.shard_ranks = shape->shard_ranks;
    group.deadline_ns = LONG_NS;
    CHECK_OK(gemini_group_open(n.w.mgr, &group, &n.group));
  }
  gemini_arena_config_t a = GEMINI_ARENA_CONFIG_INIT;
  a.element_bytes = 2;
  a.name = "params";
  a.group = n.group;
  a.zero_stage = n.group ? GEMINI_ZERO_PARAMS : 0;
  CHECK_OK(gemini_arena_create(n.w.mgr, &a, &n.arenas[0]));
  n.arenas[1] = world_arena(&n.w, GEMINI_KIND_MASTER, 4, "masters", n.arenas[0], 0);
  n.arenas[2] = world_arena(&n.w, GEMINI_KIND_OTHER, 1, "extra", 0, 0);
  if (shape->another_arena) world_arena(&n.w, GEMINI_KIND_OTHER, 1, "another", 0, 0);
  for (int i = 0; i < TENSORS; i++) {
    char name[16];
    const bool last = i == TENSORS - 1;
    snprintf(name, sizeof name, "p %d", i);
    n.tensors[0][i] = world_tensor(&n.w, n.arenas[0], last && shape->last_name ? shape->last_name : name,
                                   last && shape->last_size ? shape->last_size : sizes[i]);
    CHECK_OK(gemini_tensor_counterpart(n.w.mgr, n.tensors[0][i], n.arenas[1], &n.tensors[1][i]));
  }
  n.tensors[2][0] = world_tensor(&n.w, n.arenas[2], "x", EXTRA_SIZE);
  return n;
}
/* The parts of all tensors that this rank keeps are written, or compared. Tensor 1 stays zero. */
static bool node_each(node_t *n, uint64_t seed, bool write) {
  bool right = true;
  for (int kind = 0; kind < KINDS; kind++)
    for (int i = 0; i < (kind == 2 ? 1 : TENSORS); i++) {
      const uint64_t own = i == 1 ? 0 : seed + 10 * (uint64_t)kind + (uint64_t)i;
      gemini_access_t all = world_whole(n->tensors[kind][i], 0, 0);
      uint64_t offset, size;
      for (uint64_t next = 0;; next = offset + size) {
        CHECK_OK(gemini_slice_next(n->w.mgr, &all, next, &offset, &size));
        if (!size) break;
        if (size > 2 * W) size = 2 * W;
        gemini_access_t part = world_part(n->tensors[kind][i], offset, size, write ? GEMINI_WRITE : GEMINI_READ, HOST);
        if (write && !own) continue;
        CHECK_OK(gemini_acquire(n->w.mgr, &part, 1, GEMINI_STREAM_CALLER));
        if (write) world_write(part.ptr, offset, size, own);
        else right &= world_reads(part.ptr, offset, size, own);
        CHECK_OK(gemini_release(n->w.mgr, &part, 1, GEMINI_STREAM_CALLER));
      }
    }
  return right;
}
static void node_fill(node_t *n, uint64_t seed) { (void)node_each(n, seed, true); }
static bool node_holds(node_t *n, uint64_t seed) { return node_each(n, seed, false); }
static gemini_status_t node_save(node_t *n) { return gemini_group_checkpoint(n->w.mgr, n->group, dir, "run"); }
static gemini_status_t node_load(node_t *n) { return gemini_group_resume(n->w.mgr, n->group, dir, "run"); }
static void node_close(node_t *n) { world_close(&n->w); }

/* Runs fn as each rank, in processes; ends[] says how each ended. ranks 0: in this process. */
typedef void (*node_fn)(const node_shape_t *shape, const gemini_group_id_t *id, uint64_t value);
static int ends[PROCESSES_MOST];
static void run_ranks(node_shape_t shape, node_fn fn, uint64_t value) {
  gemini_group_id_t id;
  pid_t pids[PROCESSES_MOST];
  if (!shape.ranks) {
    fn(&shape, NULL, value);
    return;
  }
  CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, shape.ranks, &id));
  for (uint32_t r = 1; r < shape.ranks; r++) {
    pids[r] = fork_child();
    if (pids[r]) continue;
    shape.rank = r;
    fn(&shape, &id, value);
    exit(0);
  }
  shape.rank = 0;
  fn(&shape, &id, value);
  for (uint32_t r = 1; r < shape.ranks; r++) CHECK_EQ(waitpid(pids[r], &ends[r], 0), pids[r]);
}
static void run_well(node_shape_t shape, node_fn fn, uint64_t value) {
  run_ranks(shape, fn, value);
  for (uint32_t r = 1; r < shape.ranks; r++) CHECK_EQ(ends[r], 0);
}

static void save_fn(const node_shape_t *shape, const gemini_group_id_t *id, uint64_t seed) {
  node_t n = node_open(shape, id);
  node_fill(&n, seed);
  CHECK_OK(node_save(&n));
  CHECK(node_holds(&n, seed)); /* it goes on as it was */
  node_close(&n);
}
static void load_fn(const node_shape_t *shape, const gemini_group_id_t *id, uint64_t seed) {
  node_t n = node_open(shape, id);
  CHECK_OK(node_load(&n));
  CHECK_EQ(world_tensor_info(&n.w, n.tensors[0][0]).state, GEMINI_STATE_HOLD);
  CHECK_EQ(world_tensor_info(&n.w, n.tensors[0][1]).state, GEMINI_STATE_FREE);
  CHECK(node_holds(&n, seed));
  gemini_access_t all = world_whole(n.tensors[0][0], GEMINI_READ, DEVICE); /* gathered from all ranks */
  CHECK_OK(gemini_acquire(n.w.mgr, &all, 1, GEMINI_STREAM_CALLER));
  CHECK(world_reads(all.ptr, 0, sizes[0], seed));
  CHECK_OK(gemini_release(n.w.mgr, &all, 1, GEMINI_STREAM_CALLER));
  node_close(&n);
}

static void test_what_some_ranks_saved_others_load(void) {
  process_t before = process_now();
  for (uint32_t savers = 0; savers <= RANKS_MOST; savers++) {
    dir_make(dir);
    run_well((node_shape_t){ .ranks = savers }, save_fn, 100);
    for (uint32_t loaders = 0; loaders <= RANKS_MOST; loaders++) {
      /* another chunk size, and so little memory that what is read has to go on to files */
      node_shape_t shape = { .ranks = loaders };
      if (loaders == 2) shape.chunk_bytes = 2 * W;
      if (loaders == 3) shape.host_chunks = 8, shape.file_chunks = 100;
      run_well(shape, load_fn, 100);
    }
    if (savers == RANKS_MOST) run_well((node_shape_t){ .ranks = PROCESSES_MOST }, load_fn, 100);
    CHECK_EQ(files_in_dir(), 2 + 2 * (int)(savers ? savers : 1)); /* root, lock, and a pair of each rank */
    clear_dir();
  }
  process_check(before);
}

/* Several checkpoints of one run; loaded by fewer ranks, which go on and save. */
static void saves_fn(const node_shape_t *shape, const gemini_group_id_t *id, uint64_t seed) {
  node_t n = node_open(shape, id);
  gemini_status_t status = node_load(&n);
  if (seed) CHECK_OK(status);
  else CHECK_STATUS(status, GEMINI_ERR_NOT_FOUND);
  if (!seed) CHECK_SAYS(world_error().message, "there is no checkpoint yet");
  if (seed) CHECK(node_holds(&n, seed));
  for (int i = 1; i <= 3; i++) {
    node_fill(&n, seed + 1000 * (uint64_t)i);
    CHECK_OK(node_save(&n));
  }
  CHECK_STATUS(node_load(&n), GEMINI_ERR_STATE);
  CHECK_SAYS(world_error().message, "resume first");
  CHECK(node_holds(&n, seed + 3000));
  node_close(&n);
}
static void test_a_run_goes_on_with_other_ranks(void) {
  process_t before = process_now();
  dir_make(dir);
  run_well((node_shape_t){ .ranks = 4, .file_chunks = 100, .host_chunks = 10 }, saves_fn, 0);
  CHECK_EQ(files_in_dir(), 10);
  run_well((node_shape_t){ .ranks = 2 }, saves_fn, 3000);
  CHECK_EQ(files_in_dir(), 6);
  run_well((node_shape_t){ .ranks = 3 }, saves_fn, 6000);
  CHECK_EQ(files_in_dir(), 8);
  run_well((node_shape_t){ .ranks = 0 }, saves_fn, 9000);
  CHECK_EQ(files_in_dir(), 4);
  clear_dir();
  process_check(before);
}

/* The first replica writes, all read. */
static void parted_fn(const node_shape_t *shape, const gemini_group_id_t *id, uint64_t seed) {
  node_t n = node_open(shape, id);
  node_fill(&n, seed + (shape->rank == 3)); /* which has the same slices as rank 1 */
  CHECK_STATUS(node_save(&n), GEMINI_ERR_INVALID);
  CHECK_SAYS(world_error().message,
             "rank 3 differs from rank 1: its bytes, of which one copy would be saved, are others");
  node_close(&n);
}
static void test_replicas_save_once_and_all_load(void) {
  process_t before = process_now();
  const node_shape_t replicas = { .ranks = 4, .shard_ranks = 2 };
  dir_make(dir);
  run_well(replicas, save_fn, 300);
  CHECK_EQ(files_in_dir(), 2 + 2 * 2);
  run_well(replicas, parted_fn, 400);
  CHECK_EQ(files_in_dir(), 2 + 2 * 2);
  for (uint32_t ranks = 0; ranks <= 3; ranks++) run_well((node_shape_t){ .ranks = ranks }, load_fn, 300);
  run_well((node_shape_t){ .ranks = 4, .shard_ranks = 1 }, load_fn, 300);
  run_well((node_shape_t){ .ranks = 3 }, save_fn, 500);
  run_well(replicas, load_fn, 500);
  run_well((node_shape_t){ .ranks = 4, .shard_ranks = 2, .host_chunks = 10, .file_chunks = 100 }, saves_fn, 500);
  clear_dir();
  process_check(before);
}

/* gemini_checkpoint() of one process, which a group goes on from under another name. */
static void test_a_checkpoint_of_one_process_is_loaded_by_ranks(void) {
  process_t before = process_now();
  dir_make(dir);
  node_t n = node_open(&(node_shape_t){ .kept = true }, NULL);
  node_fill(&n, 40);
  CHECK_OK(gemini_checkpoint(n.w.mgr));
  run_well((node_shape_t){ .ranks = 0 }, load_fn, 40); /* while it is open */
  CHECK_STATUS(node_save(&n), GEMINI_ERR_EXISTS);
  CHECK_SAYS(world_error().message, "run.index");
  CHECK_OK(gemini_group_checkpoint(n.w.mgr, NULL, dir, "other"));
  node_close(&n);
  run_well((node_shape_t){ .ranks = 3 }, load_fn, 40);
  char path[400], root[400];
  find_file("other.ranks", path);
  snprintf(root, sizeof root, "%s/run.ranks", dir);
  CHECK_EQ(rename(path, root), 0);
  n = node_open(&(node_shape_t){ 0 }, NULL);
  CHECK_STATUS(node_load(&n), GEMINI_ERR_FORMAT);
  CHECK_SAYS(world_error().message, "two checkpoints named run");
  node_close(&n);
  clear_dir();
  process_check(before);
}

/* ---- where slices are: each rank for itself */
static uint64_t own_bytes_of(node_t *n, gemini_tensor_t tensor) {
  gemini_access_t all = world_whole(tensor, 0, 0);
  uint64_t offset, size, sum = 0;
  for (uint64_t next = 0;; next = offset + size, sum += size) {
    CHECK_OK(gemini_slice_next(n->w.mgr, &all, next, &offset, &size));
    if (!size) return sum;
  }
}
static void check_gathered(node_t *n, uint64_t seed) {
  for (int i = 0; i < TENSORS; i += 2) {
    gemini_access_t all = world_whole(n->tensors[0][i], GEMINI_READ, DEVICE);
    CHECK_OK(gemini_acquire(n->w.mgr, &all, 1, GEMINI_STREAM_CALLER));
    CHECK(world_reads(all.ptr, 0, sizes[i], seed + (uint64_t)i));
    CHECK_OK(gemini_release(n->w.mgr, &all, 1, GEMINI_STREAM_CALLER));
  }
}
static void moving_fn(const node_shape_t *shape, const gemini_group_id_t *id, uint64_t seed) {
  node_t n = node_open(shape, id);
  gemini_tensor_t param = n.tensors[0][2];
  const uint64_t own = own_bytes_of(&n, param), other_tier = shape->rank == 1 ? GEMINI_TIER_FILE : HOST;
  CHECK(own > 2 * W && own < sizes[2]);
  node_fill(&n, seed);
  CHECK_EQ(world_tier_bytes(&n.w, param, HOST), own);
  check_gathered(&n, seed);
  CHECK_EQ(world_tier_bytes(&n.w, param, HOST), own); /* gathered chunks are no slices */
  if (shape->rank != 2) {                             /* the others do something, and not the same */
    gemini_access_t to = world_whole(param, 0, (uint32_t)other_tier);
    CHECK_OK(gemini_move(n.w.mgr, &to, 1));
    CHECK_EQ(world_tier_bytes(&n.w, param, (uint32_t)other_tier), own);
    check_gathered(&n, seed);
  } else {
    check_gathered(&n, seed);
  }
  if (shape->rank == 1) {
    gemini_access_t all = world_whole(param, 0, DEVICE), small = world_whole(n.tensors[1][3], 0, DEVICE);
    CHECK_OK(gemini_pin(n.w.mgr, &all));
    CHECK_EQ(world_tier_bytes(&n.w, param, DEVICE), own);
    CHECK_OK(
        gemini_hint(n.w.mgr, &small, 1)); /* states never are on the device as a whole, but slices of them can be */
    CHECK_EQ(world_tier_bytes(&n.w, n.tensors[1][3], DEVICE), own_bytes_of(&n, n.tensors[1][3]));
  }
  check_gathered(&n, seed); /* from the pinned slices, too */
  CHECK_OK(node_save(&n));
  if (shape->rank == 1) {
    gemini_access_t all = world_whole(param, 0, DEVICE);
    CHECK_OK(gemini_unpin(n.w.mgr, &all));
    CHECK_STATUS(gemini_unpin(n.w.mgr, &all), GEMINI_ERR_STATE);
    all.tier = HOST;
    CHECK_OK(gemini_move(n.w.mgr, &all, 1));
    CHECK_EQ(world_tier_bytes(&n.w, param, HOST), own);
  }
  CHECK(node_holds(&n, seed));
  node_close(&n);
}
static void test_slices_move_on_each_rank_by_itself(void) {
  process_t before = process_now();
  dir_make(dir);
  run_well((node_shape_t){ .ranks = 3, .file_chunks = 100 }, moving_fn, 70);
  run_well((node_shape_t){ .ranks = 0 }, load_fn, 70);
  clear_dir();
  process_check(before);
}

/* ---- training that goes on elsewhere */
typedef struct {
  float param[ELEMENTS_MOST], master[ELEMENTS_MOST], momentum[ELEMENTS_MOST], gradient[ELEMENTS_MOST];
} values_t;
static values_t *values; /* what the checkpoint must hold; shared with the ranks */

static void exchange_values(rank_t *k, bool save) {
  float *const ours[] = { k->model.param, k->model.master, k->model.momentum, k->model.gradient };
  float *const theirs[] = { values->param, values->master, values->momentum, values->gradient };
  const uint64_t bytes = k->model.first[LAYERS] * sizeof(float);
  CHECK(k->model.first[LAYERS] <= ELEMENTS_MOST);
  for (int i = 0; i < 4; i++) memcpy(save ? theirs[i] : ours[i], save ? ours[i] : theirs[i], bytes);
}
static void check_arena(rank_t *k, gemini_arena_t arena, uint32_t bytes, const float *expected) {
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    const uint64_t first = k->model.first[layer];
    uint64_t wrong = 0, offset, size;
    gemini_access_t all = world_part(arena, first * bytes, k->model.elements[layer] * bytes, 0, 0);
    for (uint64_t next = first * bytes;; next = offset + size) {
      CHECK_OK(gemini_slice_next(k->w.mgr, &all, next, &offset, &size));
      if (!size) break;
      gemini_access_t part = world_part(arena, offset, size, GEMINI_READ, HOST);
      CHECK_OK(gemini_acquire(k->w.mgr, &part, 1, GEMINI_STREAM_CALLER));
      wrong += count_wrong(part.ptr, expected + offset / bytes, size / bytes, bytes);
      CHECK_OK(gemini_release(k->w.mgr, &part, 1, GEMINI_STREAM_CALLER));
    }
    CHECK_EQ(wrong, 0);
  }
}
static gemini_status_t rank_save(rank_t *k) { return gemini_group_checkpoint(k->w.mgr, k->group, dir, "run"); }
static void finish_step(rank_t *k) {
  CHECK_OK(check_norm(k));
  CHECK_OK(update(k, 4, any_span));
  CHECK_OK(gemini_iteration_end(k->w.mgr));
  model_update(k);
}
static void train_fn(const shape_t *shape, uint32_t rank, gemini_group_config_t group) {
  rank_t *k = malloc(sizeof *k);
  rank_open(k, shape, rank, group);
  gemini_access_t pinned = world_part(k->params, 0, 5 * W, 0, 0);
  if (rank == 1) CHECK_OK(gemini_pin(k->w.mgr, &pinned)); /* slices of this rank alone stay on the device */
  CHECK_OK(step(k, 0, true));
  CHECK_OK(gemini_iteration_begin(k->w.mgr));
  CHECK_OK(micro_batch(k, 5));
  if (has_sums(k)) { /* between two micro-batches */
    CHECK_OK(rank_save(k));
    if (!rank) exchange_values(k, true);
    CHECK_OK(micro_batch(k, 105));
    finish_step(k);
    CHECK_OK(gemini_group_checkpoint(k->w.mgr, k->group, dir, "after the update"));
  } else {
    CHECK_STATUS(rank_save(k), GEMINI_ERR_STATE);
    CHECK_SAYS(world_error().message, "after the update");
    finish_step(k);
    CHECK_OK(rank_save(k));
    if (!rank) exchange_values(k, true);
    CHECK_OK(step(k, 1, true));
  }
  CHECK_EQ(atomic_load(&k->wrong), 0);
  rank_close(k);
  free(k);
}
static void go_on_fn(const shape_t *shape, uint32_t rank, gemini_group_config_t group) {
  rank_t *k = malloc(sizeof *k);
  rank_begin(k, shape, rank, group);
  CHECK_OK(gemini_group_resume(k->w.mgr, k->group, dir, "run"));
  exchange_values(k, false);
  check_arena(k, k->params, shape->element_bytes, k->model.param);
  check_arena(k, k->masters, 4, k->model.master);
  check_arena(k, k->momenta, 4, k->model.momentum);
  if (has_sums(k)) check_arena(k, k->grads, shape->element_bytes, k->model.gradient);
  if (has_sums(k) && k->group) { /* the second micro-batch is added to what was saved */
    k->model.summed = true;
    CHECK_OK(gemini_iteration_begin(k->w.mgr));
    CHECK_OK(micro_batch(k, 105));
    finish_step(k);
  } else if (!has_sums(k)) {
    CHECK_OK(step(k, 1, true));
    CHECK_OK(step(k, 2, true));
  }
  CHECK_EQ(atomic_load(&k->wrong), 0);
  rank_close(k);
  free(k);
}
/* Sums that an update has taken are not saved: the next ones replace them. */
static void after_fn(const shape_t *shape, uint32_t rank, gemini_group_config_t group) {
  rank_t *k = malloc(sizeof *k);
  rank_begin(k, shape, rank, group);
  CHECK_OK(gemini_group_resume(k->w.mgr, k->group, dir, "after the update"));
  check_arena(k, k->grads, shape->element_bytes, k->model.gradient); /* zeros */
  rank_close(k);
  free(k);
}
static void run_training(shape_t shape, void (*fn)(const shape_t *, uint32_t, gemini_group_config_t)) {
  gemini_group_id_t id;
  gemini_group_config_t group = GEMINI_GROUP_CONFIG_INIT;
  pid_t pids[RANKS_MOST];
  group.id = &id;
  group.deadline_ns = LONG_NS;
  if (!shape.alone) CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, shape.ranks, &id));
  for (uint32_t r = 1; r < shape.ranks; r++) {
    pids[r] = fork_child();
    if (pids[r]) continue;
    fn(&shape, r, group);
    exit(0);
  }
  fn(&shape, 0, group);
  for (uint32_t r = 1; r < shape.ranks; r++) fork_expect_end(pids[r]);
}
static void test_training_goes_on_with_other_ranks(void) {
  process_t before = process_now();
  values = mmap(NULL, sizeof *values, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(values != MAP_FAILED);
  for (uint32_t sums = 0; sums < 2; sums++) {
    shape_t shape = { .ranks = 4, .element_bytes = 2, .device_chunks = 64, .host_chunks = 96 };
    shape.stage = sums ? GEMINI_ZERO_GRADIENTS : GEMINI_ZERO_PARAMS;
    shape.micro_batches = sums ? 2 : 0;
    dir_make(dir);
    run_training(shape, train_fn);
    for (uint32_t ranks = 0; ranks < 4; ranks++) {
      shape.ranks = ranks ? ranks : 1;
      shape.alone = !ranks;
      run_training(shape, go_on_fn);
      if (sums && ranks == 2) run_training(shape, after_fn);
    }
    clear_dir();
  }
  munmap(values, sizeof *values);
  process_check(before);
}

/* ---- files and ranks that are wrong */
static void refused(node_shape_t shape, gemini_status_t expected, const char *words) {
  node_t n = node_open(&shape, NULL);
  CHECK_STATUS(node_load(&n), expected);
  CHECK_SAYS(world_error().message, words);
  CHECK_EQ(world_stats(&n.w).used_bytes[HOST], 0);
  node_close(&n);
}
static void test_other_layouts_and_damaged_files_are_refused(void) {
  process_t before = process_now();
  char path[400];
  static const struct {
    const char *file;
    off_t offset;
    const char *words;
  } damages[] = {
    { ".2.index", 100, "its checksum is not that of its bytes" },
    { ".ranks", 90, "its checksum is not that of its bytes" },
    { ".1.0.chunks", 5000, "the block's checksum is" },
  };
  dir_make(dir);
  run_well((node_shape_t){ .ranks = 3 }, save_fn, 60);
  refused((node_shape_t){ .last_size = 4 * W }, GEMINI_ERR_FORMAT,
          "no arena of this name, kind, element size and size");
  refused((node_shape_t){ .last_name = "q" }, GEMINI_ERR_FORMAT, "the checkpoint has tensor p 3");
  refused((node_shape_t){ .another_arena = true }, GEMINI_ERR_FORMAT, "arena another of this manager is not in");
  for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
    find_file(damages[i].file, path);
    flip_byte(path, damages[i].offset);
    refused((node_shape_t){ 0 }, GEMINI_ERR_FORMAT, damages[i].words);
    CHECK_SAYS(world_error().message, damages[i].file);
    flip_byte(path, damages[i].offset);
  }
  /* an index that is right by itself, and not the one that was committed */
  char beside[410];
  bool in_force;
  gmi_index_t index;
  find_file(".1.index", path);
  snprintf(beside, sizeof beside, "%s.new", path);
  CHECK_OK(gmi_index_read(&gmi_sys_real, path, &index));
  index.number++;
  CHECK_OK(gmi_index_write(&gmi_sys_real, path, beside, &index, &in_force));
  refused((node_shape_t){ 0 }, GEMINI_ERR_FORMAT, "but the checkpoint was made with one of");
  index.number--;
  CHECK_OK(gmi_index_write(&gmi_sys_real, path, beside, &index, &in_force));
  gmi_index_free(&index);
  static const char *const lost[] = { ".1.index", ".0.0.chunks" };
  for (int i = 0; i < 2; i++) {
    char away[410];
    find_file(lost[i], path);
    snprintf(away, sizeof away, "%s.away", path);
    CHECK_EQ(rename(path, away), 0);
    refused((node_shape_t){ 0 }, GEMINI_ERR_FORMAT, lost[i]);
    CHECK_EQ(rename(away, path), 0);
  }
  run_well((node_shape_t){ .ranks = 2 }, load_fn, 60);
  clear_dir();
  process_check(before);
}

/* What one rank does otherwise, or fails in, fails on all, in its words; the checkpoint from before stays, and the next
 * one succeeds. */
typedef struct {
  const char *fails, *words;
  gemini_status_t status;
  uint32_t rank, after;
  int error;
  enum { NOTHING, OTHER_NAME, OTHER_TENSOR, OTHER_BYTES, ACQUIRED } differs;
} fault_t;
static const fault_t save_faults[] = {
  { .fails = "fallocate", .error = ENOSPC, .rank = 1, .status = GEMINI_ERR_OOM_FILE, .words = "could not reserve" },
  { .fails = "fdatasync", .error = EIO, .rank = 2, .status = GEMINI_ERR_IO, .words = ".2.0.chunks" },
  { .fails = "rename", .error = EIO, .rank = 1, .status = GEMINI_ERR_IO, .words = ".1.index.new" },
  { .fails = "rename", .error = EIO, .rank = 0, .after = 1, .status = GEMINI_ERR_IO, .words = "run.ranks.new" },
  { .differs = OTHER_NAME, .rank = 2, .status = GEMINI_ERR_INVALID, .words = "rank 2 differs from rank 0: name" },
  { .differs = OTHER_TENSOR, .rank = 1, .status = GEMINI_ERR_INVALID, .words = "rank 1 differs from rank 0: other" },
  { .differs = OTHER_BYTES, .rank = 2, .status = GEMINI_ERR_INVALID, .words = "others in arena extra" },
  { .differs = ACQUIRED, .rank = 1, .status = GEMINI_ERR_BUSY, .words = "a chunk of arena masters is acquired" },
};
static void fault_fn(const node_shape_t *shape, const gemini_group_id_t *id, uint64_t value) {
  const fault_t *f = &save_faults[value];
  const bool me = shape->rank == f->rank;
  node_shape_t mine = *shape;
  if (me && f->differs == OTHER_TENSOR) mine.last_name = "q";
  node_t n = node_open(&mine, id);
  node_fill(&n, 100);
  if (f->differs != OTHER_TENSOR) CHECK_OK(node_save(&n));
  node_fill(&n, 200);
  gemini_access_t use = world_part(n.tensors[2][0], 5, 1, GEMINI_READ_WRITE, HOST);
  if (me && f->differs == OTHER_BYTES) {
    CHECK_OK(gemini_acquire(n.w.mgr, &use, 1, GEMINI_STREAM_CALLER));
    *(uint8_t *)use.ptr ^= 1;
    CHECK_OK(gemini_release(n.w.mgr, &use, 1, GEMINI_STREAM_CALLER));
  }
  gemini_access_t all = world_whole(n.tensors[1][2], 0, 0), part;
  uint64_t offset, size;
  CHECK_OK(gemini_slice_next(n.w.mgr, &all, 0, &offset, &size));
  part = world_part(n.tensors[1][2], offset, size, GEMINI_READ_WRITE, HOST);
  if (me && f->differs == ACQUIRED) CHECK_OK(gemini_acquire(n.w.mgr, &part, 1, GEMINI_STREAM_CALLER));
  if (me) fails.after = f->after, fails.error = f->error, fails.what = f->fails;
  gemini_status_t status =
      gemini_group_checkpoint(n.w.mgr, n.group, dir, me && f->differs == OTHER_NAME ? "walk" : "run");
  fails.what = NULL;
  CHECK_EQ(status, f->status);
  char from[16];
  snprintf(from, sizeof from, "rank %u", f->rank);
  CHECK_SAYS(world_error().message, f->words);
  if (!me) CHECK_SAYS(world_error().message, from);
  CHECK_EQ(strcmp(world_error().operation, "gemini_group_checkpoint"), 0);
  if (me && f->differs == ACQUIRED) CHECK_OK(gemini_release(n.w.mgr, &part, 1, GEMINI_STREAM_CALLER));
  uint8_t here = 1, all_here[RANKS_MOST];
  CHECK_OK(gemini_group_exchange(n.w.mgr, n.group, &here, 1, all_here));
  if (f->differs != OTHER_TENSOR) CHECK_EQ(files_in_dir(), 8 + (f->differs == OTHER_NAME && f->rank == 0));
  if (!shape->rank && f->differs != OTHER_TENSOR) {
    node_t reader = node_open(&(node_shape_t){ 0 }, NULL);
    CHECK_OK(node_load(&reader));
    CHECK(node_holds(&reader, 100));
    node_close(&reader);
  }
  CHECK_OK(gemini_group_exchange(n.w.mgr, n.group, &here, 1, all_here));
  if (me && f->differs == OTHER_BYTES) node_fill(&n, 200);
  if (f->differs != OTHER_TENSOR) CHECK_OK(node_save(&n));
  node_close(&n);
}
static void test_a_rank_that_fails_or_differs_fails_all_in_its_words(void) {
  process_t before = process_now();
  for (uint64_t i = 0; i < sizeof save_faults / sizeof *save_faults; i++) {
    dir_make(dir);
    run_well((node_shape_t){ .ranks = 3 }, fault_fn, i);
    if (save_faults[i].differs != OTHER_TENSOR) run_well((node_shape_t){ .ranks = 0 }, load_fn, 200);
    clear_dir();
  }
  process_check(before);
}

/* A rank that cannot read its bytes: none has any, and they can try again. */
static void unread_fn(const node_shape_t *shape, const gemini_group_id_t *id, uint64_t seed) {
  node_t n = node_open(shape, id);
  if (shape->rank == 1) fails.after = 3, fails.error = EIO, fails.what = "pread";
  CHECK_STATUS(node_load(&n), GEMINI_ERR_IO);
  CHECK_SAYS(world_error().message, "could not read");
  if (shape->rank != 1) CHECK_SAYS(world_error().message, "rank 1: ");
  fails.what = NULL;
  CHECK_EQ(world_stats(&n.w).used_bytes[HOST], 0);
  CHECK_EQ(world_tensor_info(&n.w, n.tensors[0][0]).state, GEMINI_STATE_FREE);
  CHECK_OK(node_load(&n));
  CHECK(node_holds(&n, seed));
  node_close(&n);
}
static void test_a_rank_that_cannot_read_leaves_all_as_they_were(void) {
  process_t before = process_now();
  dir_make(dir);
  run_well((node_shape_t){ .ranks = 2 }, save_fn, 60);
  run_well((node_shape_t){ .ranks = 3 }, unread_fn, 60);
  clear_dir();
  process_check(before);
}

/* As a network's file system does that sends the request again. Whether the new checkpoint is in force can be read, or
 * cannot: then its files stay. */
static void test_a_rename_that_is_done_and_fails_loses_nothing(void) {
  process_t before = process_now();
  for (int blinded = 0; blinded < 2; blinded++) {
    dir_make(dir);
    node_t n = node_open(&(node_shape_t){ 0 }, NULL);
    node_fill(&n, 100);
    CHECK_OK(node_save(&n));
    node_fill(&n, 200);
    lies = true;
    blinds = blinded;
    gemini_status_t status = node_save(&n);
    lies = blind = false;
    CHECK_EQ(status, blinded ? GEMINI_ERR_IO : GEMINI_OK);
    if (blinded) CHECK_SAYS(world_error().message, "could not rename");
    run_well((node_shape_t){ 0 }, load_fn, 200);
    CHECK_OK(node_save(&n));
    CHECK_EQ(files_in_dir(), 4);
    node_close(&n);
    clear_dir();
  }
  process_check(before);
}

/* The index of one process is replaced between a reader's look for a root and its reading of the part. */
static void test_an_index_replaced_while_it_is_read_is_refused(void) {
  process_t before = process_now();
  char index[400], first[400];
  dir_make(dir);
  node_t n = node_open(&(node_shape_t){ .kept = true }, NULL);
  node_fill(&n, 40);
  CHECK_OK(gemini_checkpoint(n.w.mgr));
  find_file("run.index", index);
  snprintf(first, sizeof first, "%s/first", dir);
  CHECK_EQ(rename(index, first), 0);
  node_fill(&n, 80);
  CHECK_OK(gemini_checkpoint(n.w.mgr)); /* whose blocks lie beside the first one's */
  node_close(&n);
  index_opens = 0;
  snprintf(second, sizeof second, "%s/second", dir);
  CHECK_EQ(rename(index, second), 0);
  CHECK_EQ(rename(first, index), 0);
  n = node_open(&(node_shape_t){ 0 }, NULL);
  CHECK_STATUS(node_load(&n), GEMINI_ERR_FORMAT);
  CHECK_SAYS(world_error().message, "replaced while it was read");
  CHECK_EQ(*second, 0);
  CHECK_OK(node_load(&n));
  CHECK(node_holds(&n, 80));
  node_close(&n);
  clear_dir();
  process_check(before);
}

/* Where there are no locks, of two checkpoints that are made at the same time the first stays. */
static void test_without_locks_the_first_of_two_checkpoints_stays(void) {
  process_t before = process_now();
  char root[400], other[400];
  dir_make(dir);
  node_t n = node_open(&(node_shape_t){ 0 }, NULL);
  node_fill(&n, 100);
  CHECK_OK(node_save(&n));
  CHECK_EQ(*warning, 0);
  snprintf(root, sizeof root, "%s/run.ranks", dir);
  snprintf(other, sizeof other, "%s/other", dir);
  CHECK_EQ(rename(root, other), 0);
  node_fill(&n, 200);
  lockless = true;
  CHECK_OK(node_save(&n)); /* of number 1, too: it does not remove what it has not seen */
  CHECK_SAYS(warning, "has no locks");
  CHECK_EQ(files_in_dir(), 7);
  node_fill(&n, 300);
  strcpy(other_root, other);
  CHECK_STATUS(node_save(&n), GEMINI_ERR_BUSY);
  CHECK_SAYS(world_error().message, "another process has made checkpoint 1 of the name run");
  CHECK_EQ(files_in_dir(), 6);
  run_well((node_shape_t){ 0 }, load_fn, 100);
  CHECK_OK(node_save(&n));
  lockless = false;
  CHECK_EQ(files_in_dir(), 4);
  run_well((node_shape_t){ 0 }, load_fn, 300);
  node_close(&n);
  clear_dir();
  process_check(before);
}

/* Names: the longest one has room for the ends of all files; those of parts are no other checkpoint's. */
static void test_names_at_their_limits(void) {
  process_t before = process_now();
  static const char *const taken[] = { "run.1-2.3", "run.18446744073709551615-0.0", ".1-2.3" };
  static const char *const free_names[] = { "run.1-2", "run.1-2.3.", "run.1-2.x", "1-2.3", "run.-1.2" };
  char name[202];
  dir_make(dir);
  node_t n = node_open(&(node_shape_t){ 0 }, NULL);
  node_fill(&n, 7);
  memset(name, 'n', sizeof name);
  name[161] = 0;
  CHECK_STATUS(gemini_group_checkpoint(n.w.mgr, 0, dir, name), GEMINI_ERR_INVALID);
  CHECK_SAYS(world_error().message, "1 to 160 bytes");
  name[160] = 0;
  CHECK_OK(gemini_group_checkpoint(n.w.mgr, 0, dir, name));
  CHECK_OK(gemini_group_checkpoint(n.w.mgr, 0, dir, name));
  node_close(&n);
  n = node_open(&(node_shape_t){ 0 }, NULL);
  CHECK_OK(gemini_group_resume(n.w.mgr, 0, dir, name));
  CHECK(node_holds(&n, 7));
  node_close(&n);
  gemini_config_t c = world_config(64, 128, 200);
  c.file_dir = dir;
  name[160] = 'n';
  name[200] = 0; /* of one process, which has shorter ends; ranks can read it */
  c.checkpoint_name = name;
  world_t w = world_open(c);
  CHECK_STATUS(gemini_group_resume(w.mgr, 0, dir, name), GEMINI_ERR_NOT_FOUND);
  world_close(&w);
  for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) {
    gemini_manager_t mgr = 0;
    c.checkpoint_name = taken[i];
    CHECK_STATUS(gemini_manager_open(&c, &mgr), GEMINI_ERR_INVALID);
    CHECK_SAYS(world_error().message, taken[i]);
  }
  for (size_t i = 0; i < sizeof free_names / sizeof *free_names; i++) {
    c.checkpoint_name = free_names[i];
    w = world_open(c);
    world_close(&w);
  }
  clear_dir();
  process_check(before);
}

/* ---- a rank that is killed: there is one of the two checkpoints, whole */
static uint32_t victim;
/* Rank 0 must be a process that can die: the test forks it, too. */
static void killed_fn(const node_shape_t *shape, const gemini_group_id_t *id, uint64_t at) {
  node_t n = node_open(shape, id);
  node_fill(&n, 100);
  CHECK_OK(node_save(&n));
  node_fill(&n, 200);
  atomic_store(&calls, 0);
  die_at = shape->rank == victim ? at : 0;
  gemini_status_t status = node_save(&n);
  if (shape->rank == victim) atomic_store(&shared->calls, atomic_load(&calls));
  die_at = 0;
  if (at && shape->rank != victim && status) {
    CHECK_EQ(status, GEMINI_ERR_PEER);
    CHECK(now_ns() < atomic_load(&shared->died_ns) + LATEST_NS);
    CHECK_SAYS(world_error().message, "has ended");
    CHECK(node_holds(&n, 200)); /* what the host has stays readable */
    (void)gemini_manager_close(n.w.mgr);
    exit(0);
  }
  CHECK_OK(status);
  node_close(&n);
}
static bool killed_at(uint32_t ranks, uint64_t at) { /* true: the new checkpoint is there */
  int end;
  dir_make(dir);
  pid_t child = fork_child();
  if (!child) {
    run_ranks((node_shape_t){ .ranks = ranks }, killed_fn, at);
    exit(0);
  }
  CHECK_EQ(waitpid(child, &end, 0), child);
  for (int other; waitpid(-1, &other, 0) > 0;) /* ranks that rank 0 has left */
    CHECK(!other || (victim && WIFSIGNALED(other) && WTERMSIG(other) == SIGKILL));
  CHECK(at && !victim ? WIFSIGNALED(end) && WTERMSIG(end) == SIGKILL : end == 0);
  node_t n = node_open(&(node_shape_t){ 0 }, NULL);
  CHECK_OK(node_load(&n));
  gemini_access_t all = world_whole(n.tensors[2][0], GEMINI_READ, HOST);
  CHECK_OK(gemini_acquire(n.w.mgr, &all, 1, GEMINI_STREAM_CALLER));
  const bool is_new = ((const uint8_t *)all.ptr)[0] == world_byte(220, 0) &&
                      ((const uint8_t *)all.ptr)[1] == world_byte(220, 1) &&
                      ((const uint8_t *)all.ptr)[2] == world_byte(220, 2);
  CHECK_OK(gemini_release(n.w.mgr, &all, 1, GEMINI_STREAM_CALLER));
  CHECK(node_holds(&n, is_new ? 200 : 100));
  node_fill(&n, 300);
  CHECK_OK(node_save(&n)); /* of the same number as the attempt, perhaps */
  CHECK_OK(node_save(&n));
  CHECK(files_in_dir() == 4); /* nothing of other attempts is left */
  node_close(&n);
  clear_dir();
  return is_new;
}
enum { KILLS_APART = SANITIZED ? 10 : 2 }; /* each takes several processes, which are slow to start under sanitizers */
static void test_a_rank_killed_anywhere_leaves_one_checkpoint(void) {
  CHECK(!prctl(PR_SET_CHILD_SUBREAPER, 1));
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  for (victim = 0; victim < 2; victim++) {
    CHECK(killed_at(3, 0));
    const uint64_t most = atomic_load(&shared->calls);
    uint64_t old = 0, new = 0;
    CHECK(most > 10);
    for (uint64_t at = 2; at <= most;
         at += KILLS_APART) { /* behind each system call; before it is behind the one before */
      const bool is_new = killed_at(3, at);
      CHECK(!(old && new && !is_new)); /* from the rename on it is the new one */
      if (is_new) new ++;
      else old++;
    }
    CHECK(old > 0);
    if (!victim) CHECK(new > 0);
  }
  munmap(shared, sizeof *shared);
}

int main(void) {
  process_begin();
  fault_sys = gmi_sys_real;
  fault_sys.open = fault_open;
  fault_sys.fdatasync = fault_fdatasync;
  fault_sys.fsync = fault_fsync;
  fault_sys.rename = fault_rename;
  fault_sys.flock = fault_flock;
  fault_sys.unlink = fault_unlink;
  fault_sys.fallocate = fault_fallocate;
  fault_sys.pread = fault_pread;
  gmi_files_sys = &fault_sys;
  RUN(test_what_some_ranks_saved_others_load);
  RUN(test_a_run_goes_on_with_other_ranks);
  RUN(test_replicas_save_once_and_all_load);
  RUN(test_a_checkpoint_of_one_process_is_loaded_by_ranks);
  RUN(test_slices_move_on_each_rank_by_itself);
  RUN(test_training_goes_on_with_other_ranks);
  RUN(test_other_layouts_and_damaged_files_are_refused);
  RUN(test_a_rank_that_fails_or_differs_fails_all_in_its_words);
  RUN(test_a_rank_that_cannot_read_leaves_all_as_they_were);
  RUN(test_a_rename_that_is_done_and_fails_loses_nothing);
  RUN(test_an_index_replaced_while_it_is_read_is_refused);
  RUN(test_without_locks_the_first_of_two_checkpoints_stays);
  RUN(test_names_at_their_limits);
  RUN(test_a_rank_killed_anywhere_leaves_one_checkpoint);
  return check_done();
}

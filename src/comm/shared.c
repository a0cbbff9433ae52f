/* A communicator of processes on one machine over shared memory. SPDX-License-Identifier: Apache-2.0
 *
 * The memory is a file without a name (memfd). Rank 0 makes it; the id says in which process it is which descriptor,
 * and the other ranks open it through /proc, which only processes of the same user may.
 *
 * Data passes in pieces. Pieces are numbered from 1, each rank has two buffers, and piece p uses buffer p & 1. For each
 * piece a rank
 *   1. copies its bytes and a description of the call into its buffer and stores p in `written`,
 *   2. waits until `written` of each other rank is p, and compares the descriptions,
 *   3. reads the other ranks' bytes.
 * So a call is compared before its bytes are used. Ranks need not report that they have read: when a rank writes piece
 * p, all ranks have written piece p - 1, so they have read piece p - 2, which was in the same buffer.
 *
 * Replicas. Each channel has a team: the ranks that call together on it, whose places are at equal distances.
 * Reductions use two channels, one within the replica and one across replicas, each with buffers of its own: what is
 * said above about reading holds for the ranks of one team. Where a rank waits for one that waits for another one
 * itself, the message at the deadline names that one.
 *
 * A wait is a futex wait of 10 ms at most. After each one the rank looks for what would make it wait for ever: a
 * failure that another rank has recorded, a rank that has left or whose process has ended, and the deadline. The first
 * failure is recorded in the memory and ends all calls of all ranks. */
#include "comm/comm.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/fork.h"
#include "base/status.h"

#define MAGIC UINT64_C(0x31306d6d6f63696d) /* "micomm01" */
#define DEADLINE_NS UINT64_C(10000000000)
enum { LOOK_NS = 10000000, ALIGNMENT = 128 };

/* Collectives, those across replicas, and exchanges are numbered apart; a host thread can exchange beside a stream. */
enum { COLLECTIVES = 0, ACROSS = 1, EXCHANGES = 2, CHANNELS = 3 };
static const uint64_t piece_bytes[CHANNELS] = { 256 << 10, 64 << 10, 4 << 10 };

enum { ALL_GATHER = 1, REDUCE_SCATTER, ALL_REDUCE, EXCHANGE, BROADCAST };
static const char *const kinds[] = { "nothing", "all-gather", "reduce-scatter", "all-reduce", "exchange", "broadcast" };

typedef struct call {
  uint32_t kind, dtype, reduce, root;
  uint64_t bytes; /* of one rank */
  char label[GMI_COMM_LABEL_BYTES];
} call_t;

/* What one rank shows the others on one channel. */
typedef struct post {
  _Alignas(
      ALIGNMENT) _Atomic uint32_t written; /* Atomic, a futex: the last piece; stored (release) behind its bytes and
                                                 * its call, loaded (acquire) before they are read */
  call_t call[2];                          /* of the pieces in the two buffers */
  uint64_t number[2];                      /* of these calls, from 1 */
  _Atomic uint32_t awaits;                 /* Atomic: rank + 1 of whom it waits for, 0: nobody; for messages; relaxed */
} post_t;

enum { ABSENT, JOINING, JOINED, LEFT };
typedef struct member {
  _Atomic uint32_t state; /* Atomic: ABSENT to JOINING by the process that gets the rank; JOINED is stored (release)
                           * behind the fields below and loaded (acquire) before they are read */
  uint32_t pid, shard_ranks;
  uint64_t start; /* of the process, as /proc/PID/stat has it: tells it from a later one of the same number */
  _Atomic uint64_t note[GMI_COMM_LABEL_BYTES / 8]; /* Atomic: text, for people only; relaxed */
} member_t;

#define FAILED_NOT UINT32_C(0)
#define FAILED UINT32_MAX
typedef struct region {
  uint64_t magic, token[2], bytes;
  uint32_t ranks;
  _Atomic uint32_t joined; /* futex: ranks that have joined */
  _Atomic uint32_t failed; /* Atomic: FAILED_NOT, then the rank that writes why, from 1, then FAILED (release) */
  char why[420];
  member_t members[];
} region_t;

typedef struct group_id {
  uint64_t magic, token[2], start, bytes;
  uint32_t pid, ranks;
  int32_t fd;
} group_id_t;
_Static_assert(sizeof(group_id_t) <= GMI_COMM_ID_BYTES, "an id holds it");

/* Ranks first, first + step, ..., of which this one is number `own`. */
typedef struct team {
  uint32_t first, step, count, own;
} team_t;

typedef struct shared {
  region_t *region;
  post_t *posts[CHANNELS];       /* [ranks] */
  unsigned char *data[CHANNELS]; /* [ranks][2][piece_bytes] */
  uint32_t rank, ranks;          /* of all replicas */
  team_t teams[CHANNELS];
  uint64_t deadline_ns;
  uint32_t piece[CHANNELS];  /* the last one */
  uint64_t number[CHANNELS]; /* of the last call */
} shared_t;

/* ---- layout */
static uint64_t aligned(uint64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }
static uint64_t posts_at(uint32_t ranks, int channel) {
  return aligned(sizeof(region_t) + ranks * sizeof(member_t)) + (uint64_t)channel * ranks * sizeof(post_t);
}
static uint64_t data_at(uint32_t ranks, int channel) {
  uint64_t at = posts_at(ranks, CHANNELS);
  for (int c = 0; c < channel; c++) at += ranks * 2 * piece_bytes[c];
  return at;
}
static unsigned char *buffer(const shared_t *s, int channel, uint32_t rank, uint32_t piece) {
  return s->data[channel] + (rank * 2 + (piece & 1)) * piece_bytes[channel];
}

static uint32_t member_of(const team_t *team, uint32_t i) { return team->first + i * team->step; }

/* ---- processes */
typedef enum { RUNS, ENDED, UNKNOWN } life_t;
/* Fields 3 and 22 of /proc/PID/stat: the state and the start. The second field, the name, may contain blanks. */
static life_t process_life(uint32_t pid, uint64_t *start_out) {
  char path[32], text[1024];
  snprintf(path, sizeof path, "/proc/%" PRIu32 "/stat", pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return errno == ENOENT ? ENDED : UNKNOWN;
  ssize_t length = read(fd, text, sizeof text - 1);
  int error = errno;
  close(fd);
  if (length < 0) return error == ESRCH ? ENDED : UNKNOWN;
  text[length] = 0;
  const char *at = strrchr(text, ')');
  if (!at || at[1] != ' ' || !at[2]) return UNKNOWN;
  char state = at[2];
  for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
  if (!at) return UNKNOWN;
  *start_out = strtoull(at + 1, NULL, 10);
  return state == 'Z' || state == 'X' || state == 'x' ? ENDED : RUNS;
}
static bool has_ended(uint32_t pid, uint64_t start) {
  uint64_t found;
  life_t life = process_life(pid, &found);
  return life == ENDED || (life == RUNS && found != start);
}

static void futex_wait(_Atomic uint32_t *word, uint32_t value) {
  struct timespec look = { 0, LOOK_NS };
  syscall(SYS_futex, word, FUTEX_WAIT, value, &look, NULL, 0);
}
static void futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0); }

/* ---- failures */
static gemini_status_t failure(const region_t *region) {
  if (atomic_load_explicit(&region->failed, memory_order_acquire) != FAILED) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_PEER, 0, "%s", region->why);
}

/* True: this rank is to write why; nobody else does. False: another rank has written it, or has not within the
 * deadline. A rank that ends while it writes is replaced. */
static bool fails_first(shared_t *s) {
  region_t *region = s->region;
  uint64_t begin = gmi_now_ns();
  uint32_t now = FAILED_NOT;
  while (!atomic_compare_exchange_strong(&region->failed, &now, s->rank + 1)) {
    if (now == FAILED || gmi_now_ns() - begin > s->deadline_ns) return false;
    const member_t *writer = &region->members[now - 1];
    if (has_ended(writer->pid, writer->start)) continue; /* takes its place, unless another rank has */
    usleep(100);
    now = FAILED_NOT;
  }
  return true;
}

/* Ends all calls of all ranks with the text, or with that of an earlier failure. */
__attribute__((format(printf, 2, 3))) static gemini_status_t fail_all(shared_t *s, const char *format, ...) {
  region_t *region = s->region;
  if (fails_first(s)) {
    va_list args;
    va_start(args, format);
    vsnprintf(region->why, sizeof region->why, format, args);
    va_end(args);
    atomic_store_explicit(&region->failed, FAILED, memory_order_release);
    for (uint32_t r = 0; r < s->ranks; r++) {
      for (int c = 0; c < CHANNELS; c++) futex_wake(&s->posts[c][r].written);
    }
    futex_wake(&region->joined);
  }
  gemini_status_t status = failure(region);
  return status ? status : gmi_fail(GEMINI_ERR_PEER, 0, "a rank failed, and has not said why within the deadline");
}

/* "all-gather of 65536 bytes for h.3.fwd (call 17)" */
static const char *say_call(const call_t *call, uint64_t number, char text_out[192]) {
  char label[GMI_COMM_LABEL_BYTES];
  memcpy(label, call->label, sizeof label); /* another rank's may be changing */
  label[sizeof label - 1] = 0;
  uint32_t kind = call->kind < sizeof kinds / sizeof *kinds ? call->kind : 0;
  if (!kind) snprintf(text_out, 192, "none");
  else
    snprintf(text_out, 192, "%s of %" PRIu64 " bytes%s%s (call %" PRIu64 ")", kinds[kind], call->bytes,
             *label ? " for " : "", label, number);
  return text_out;
}

static void note(void *self, const char *text) {
  member_t *member = &((shared_t *)self)->region->members[((shared_t *)self)->rank];
  uint64_t words[GMI_COMM_LABEL_BYTES / 8] = { 0 };
  snprintf((char *)words, sizeof words, "%s", text);
  for (size_t i = 0; i < sizeof words / sizeof *words; i++)
    atomic_store_explicit(&member->note[i], words[i], memory_order_relaxed);
}
/* "; rank 1 has ..." for each rank that has noted something, as far as there is room. */
static const char *say_notes(const shared_t *s, char text_out[256]) {
  size_t length = 0;
  *text_out = 0;
  for (uint32_t r = 0; r < s->ranks && length < 256; r++) {
    uint64_t words[GMI_COMM_LABEL_BYTES / 8];
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
      words[i] = atomic_load_explicit(&s->region->members[r].note[i], memory_order_relaxed);
    if (!words[0]) continue;
    ((char *)words)[sizeof words - 1] = 0;
    int added = snprintf(text_out + length, 256 - length, "; rank %u %s", r, (char *)words);
    length += added > 0 ? (size_t)added : 0;
  }
  return text_out;
}

/* Whom peer waits for in a collective itself, and that one again; the last of them, and the channel of its wait. */
static uint32_t awaited_in_the_end(const shared_t *s, uint32_t peer, int *channel) {
  for (uint32_t n = 0; *channel != EXCHANGES && n < s->ranks; n++) {
    uint32_t next = 0;
    for (int c = COLLECTIVES; c <= ACROSS && !next; c++) {
      next = atomic_load_explicit(&s->posts[c][peer].awaits, memory_order_relaxed);
      if (next) *channel = c;
    }
    if (!next || next - 1 == s->rank) break;
    peer = next - 1;
  }
  return peer;
}

/* Whether a rank that has written so many pieces has written this one. By their distance, as the numbers wrap. */
static bool has_reached(uint32_t written, uint32_t piece) { return (int32_t)(written - piece) >= 0; }

/* What a rank looks for each time it has waited for `peer` in vain. */
static gemini_status_t look(shared_t *s, int channel, const call_t *call, uint32_t peer, uint32_t piece,
                            uint64_t begin_ns) {
  gemini_status_t status = failure(s->region);
  if (status) return status;
  const member_t *member = &s->region->members[peer];
  char ours[192], theirs[192], notes[256], between[48] = "";
  say_call(call, s->number[channel], ours);
  const bool left = atomic_load_explicit(&member->state, memory_order_acquire) == LEFT;
  if (left || has_ended(member->pid, member->start)) {
    /* The piece may be the last thing that it wrote, after this rank read `written`. */
    const uint32_t written = atomic_load_explicit(&s->posts[channel][peer].written, memory_order_acquire);
    if (has_reached(written, piece)) return GEMINI_OK;
    if (left) return fail_all(s, "rank %u has left the group; rank %u waits for it in %s", peer, s->rank, ours);
    return fail_all(s, "rank %u (process %u) has ended; rank %u waits for it in %s", peer, member->pid, s->rank, ours);
  }
  if (gmi_now_ns() - begin_ns < s->deadline_ns) return GEMINI_OK;
  const uint32_t last = awaited_in_the_end(s, peer, &channel);
  const post_t *post = &s->posts[channel][last];
  uint32_t newest = atomic_load_explicit(&post->written, memory_order_acquire) & 1;
  if (last != peer) snprintf(between, sizeof between, ", which rank %u waits for,", peer);
  return fail_all(s, "rank %u waited %.3g s for rank %u%s in %s; the latest call of rank %u is %s%s", s->rank,
                  (double)s->deadline_ns / 1e9, last, between, ours, last,
                  say_call(&post->call[newest], post->number[newest], theirs), say_notes(s, notes));
}

/* Waits until a peer has written the piece. */
static gemini_status_t wait_for(shared_t *s, int channel, const call_t *call, uint32_t peer, uint32_t piece) {
  _Atomic uint32_t *written = &s->posts[channel][peer].written, *awaits = &s->posts[channel][s->rank].awaits;
  uint64_t begin_ns = 0;
  uint32_t value = atomic_load_explicit(written, memory_order_acquire);
  while (!has_reached(value, piece)) {
    if (!begin_ns) {
      begin_ns = gmi_now_ns();
      atomic_store_explicit(awaits, peer + 1, memory_order_relaxed);
    }
    gemini_status_t status = look(s, channel, call, peer, piece, begin_ns);
    if (status) return status;
    futex_wait(written, value);
    value = atomic_load_explicit(written, memory_order_acquire);
  }
  if (begin_ns) atomic_store_explicit(awaits, 0, memory_order_relaxed);
  return GEMINI_OK;
}

/* ---- pieces */
typedef struct running {
  int channel;
  call_t call;
  uint32_t piece;
} running_t;

static gemini_status_t call_begin(shared_t *s, running_t *running_out, int channel, call_t call, const char *label) {
  *running_out = (running_t){ .channel = channel, .call = call };
  snprintf(running_out->call.label, sizeof running_out->call.label, "%s", label ? label : "");
  s->number[channel]++;
  return failure(s->region);
}

/* Returns this rank's buffer for the next piece. */
static unsigned char *piece_begin(shared_t *s, running_t *running) {
  running->piece = ++s->piece[running->channel];
  return buffer(s, running->channel, s->rank, running->piece);
}

/* This rank's buffer is filled. On return the others' of the team hold their bytes of the same call. */
static gemini_status_t piece_meet(shared_t *s, running_t *running) {
  post_t *post = &s->posts[running->channel][s->rank];
  post->call[running->piece & 1] = running->call;
  post->number[running->piece & 1] = s->number[running->channel];
  atomic_store_explicit(&post->written, running->piece, memory_order_release);
  futex_wake(&post->written);
  const team_t *team = &s->teams[running->channel];
  for (uint32_t i = 0; i < team->count; i++) {
    const uint32_t r = member_of(team, i);
    if (r == s->rank) continue;
    post_t *peer = &s->posts[running->channel][r];
    gemini_status_t status = wait_for(s, running->channel, &running->call, r, running->piece);
    if (status) return status;
    const call_t *theirs = &peer->call[running->piece & 1];
    char us[192], them[192], notes[256];
    if (memcmp(theirs, &running->call, sizeof *theirs)) {
      say_call(&running->call, s->number[running->channel], us);
      say_call(theirs, peer->number[running->piece & 1], them);
      return fail_all(s, "ranks differ: rank %u calls %s, rank %u calls %s%s", s->rank, us, r, them,
                      say_notes(s, notes));
    }
  }
  return GEMINI_OK;
}

/* Gathers mine of the ranks of the channel's team at all_out, in their order. mine may be its own place there. */
static gemini_status_t gather(shared_t *s, int channel, call_t call, const unsigned char *mine, unsigned char *all_out,
                              const char *label) {
  const team_t *team = &s->teams[channel];
  running_t running;
  uint64_t at = 0;
  gemini_status_t status = call_begin(s, &running, channel, call, label);
  do {
    uint64_t left = call.bytes - at, now = left < piece_bytes[channel] ? left : piece_bytes[channel];
    if (status) return status;
    unsigned char *out = piece_begin(s, &running);
    if (now) memcpy(out, mine + at, now);
    if ((status = piece_meet(s, &running))) return status;
    for (uint32_t i = 0; i < team->count && now; i++)
      memmove(all_out + i * call.bytes + at,
              i == team->own ? mine + at : buffer(s, channel, member_of(team, i), running.piece), now);
    at += now;
  } while (at < call.bytes);
  return status;
}

static gemini_status_t all_gather(void *self, void *data, uint64_t slice_bytes, void *stream, const char *label) {
  (void)stream;
  shared_t *s = self;
  call_t call = { .kind = ALL_GATHER, .bytes = slice_bytes };
  return gather(s, COLLECTIVES, call, (unsigned char *)data + s->teams[COLLECTIVES].own * slice_bytes, data, label);
}
/* Only the root's bytes count; the other ranks show none, but take part, so that a difference between ranks is seen. */
static gemini_status_t broadcast(void *self, void *data, uint64_t bytes, uint32_t root, void *stream,
                                 const char *label) {
  (void)stream;
  shared_t *s = self;
  const team_t *team = &s->teams[COLLECTIVES];
  if (root >= team->count) return gmi_fail(GEMINI_ERR_INVALID, 0, "root is %u, must be below %u", root, team->count);
  running_t running;
  uint64_t at = 0;
  gemini_status_t status =
      call_begin(s, &running, COLLECTIVES, (call_t){ .kind = BROADCAST, .root = root, .bytes = bytes }, label);
  do {
    uint64_t left = bytes - at, now = left < piece_bytes[COLLECTIVES] ? left : piece_bytes[COLLECTIVES];
    if (status) return status;
    unsigned char *out = piece_begin(s, &running), *here = (unsigned char *)data + at;
    if (now && team->own == root) memcpy(out, here, now);
    if ((status = piece_meet(s, &running))) return status;
    if (now && team->own != root) memcpy(here, buffer(s, COLLECTIVES, member_of(team, root), running.piece), now);
    at += now;
  } while (at < bytes);
  return status;
}
static gemini_status_t exchange(void *self, const void *mine, uint64_t bytes, void *all_out, const char *label) {
  call_t call = { .kind = EXCHANGE, .bytes = bytes };
  return gather(self, EXCHANGES, call, mine, all_out, label);
}

/* Each rank of the team shows, for each other one, a part of that one's slice; scatter false: the same part for all. */
static gemini_status_t reduce(shared_t *s, int channel, call_t call, unsigned char *data, bool scatter,
                              const char *label) {
  const team_t *team = &s->teams[channel];
  const uint64_t width = gmi_dtype_bytes(call.dtype), shares = scatter ? team->count : 1;
  const uint64_t most = piece_bytes[channel] / shares / width * width;
  const void *from[GMI_COMM_RANKS];
  running_t running;
  uint64_t at = 0;
  gemini_status_t status = call_begin(s, &running, channel, call, label);
  do {
    uint64_t left = call.bytes - at, now = left < most ? left : most;
    if (status) return status;
    unsigned char *out = piece_begin(s, &running);
    for (uint64_t r = 0; r < shares && now; r++) memcpy(out + r * most, data + r * call.bytes + at, now);
    if ((status = piece_meet(s, &running))) return status;
    uint64_t share = scatter ? team->own : 0;
    for (uint32_t i = 0; i < team->count; i++)
      from[i] = buffer(s, channel, member_of(team, i), running.piece) + share * most;
    gmi_reduce(call.dtype, (gmi_reduce_t)call.reduce, team->count, from, data + share * call.bytes + at, now / width);
    at += now;
  } while (at < call.bytes);
  return status;
}

/* Replaces what this replica has reduced at data by the reduction over all replicas. */
static gemini_status_t reduce_across(shared_t *s, call_t call, unsigned char *data, const char *label) {
  call.kind = ALL_REDUCE;
  return s->teams[ACROSS].count > 1 ? reduce(s, ACROSS, call, data, false, label) : GEMINI_OK;
}

static gemini_status_t reduce_scatter(void *self, void *data, uint64_t slice_count, uint32_t dtype, gmi_reduce_t how,
                                      void *stream, const char *label) {
  (void)stream;
  gemini_status_t status = gmi_reduce_check(dtype, how);
  if (status) return status;
  shared_t *s = self;
  call_t call = { REDUCE_SCATTER, dtype, (uint32_t)how, 0, slice_count * gmi_dtype_bytes(dtype), "" };
  status = reduce(s, COLLECTIVES, call, data, true, label);
  if (status) return status;
  return reduce_across(s, call, (unsigned char *)data + s->teams[COLLECTIVES].own * call.bytes, label);
}
static gemini_status_t all_reduce(void *self, void *data, uint64_t count, uint32_t dtype, gmi_reduce_t how,
                                  void *stream, const char *label) {
  (void)stream;
  gemini_status_t status = gmi_reduce_check(dtype, how);
  if (status) return status;
  call_t call = { ALL_REDUCE, dtype, (uint32_t)how, 0, count * gmi_dtype_bytes(dtype), "" };
  status = reduce(self, COLLECTIVES, call, data, false, label);
  return status ? status : reduce_across(self, call, data, label);
}

static gemini_status_t poll_failure(void *self) { return failure(((shared_t *)self)->region); }

static void abort_all(void *self, const char *why) {
  shared_t *s = self;
  (void)fail_all(s, "rank %u gave up: %s", s->rank, why ? why : "it does not say why");
}

static void close_shared(void *self) {
  shared_t *s = self;
  if (!s) return;
  atomic_store_explicit(&s->region->members[s->rank].state, LEFT, memory_order_release);
  for (int c = 0; c < CHANNELS; c++) futex_wake(&s->posts[c][s->rank].written);
  munmap(s->region, s->region->bytes);
  free(s);
}

static const gmi_comm_ops_t shared_ops = {
  .name = "shared memory",
  .all_gather = all_gather,
  .broadcast = broadcast,
  .reduce_scatter = reduce_scatter,
  .all_reduce = all_reduce,
  .exchange = exchange,
  .note = note,
  .poll = poll_failure,
  .known = poll_failure, /* which is one load */
  .abort = abort_all,
  .close = close_shared,
};

/* ---- making and joining a group */
static void close_fd(int fd) {
  gmi_fork_hold();
  gmi_fork_close_not(fd);
  close(fd);
  gmi_fork_let();
}

gemini_status_t gmi_comm_shared_id(uint32_t ranks, gmi_comm_id_t *id_out) {
  if (!ranks || ranks > GMI_COMM_RANKS)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "ranks is %u, must be 1 to %d", ranks, GMI_COMM_RANKS);
  group_id_t id = { .magic = MAGIC, .ranks = ranks, .pid = (uint32_t)getpid(), .bytes = data_at(ranks, CHANNELS) };
  if (process_life(id.pid, &id.start) != RUNS)
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "/proc does not show this process");
  if (getrandom(id.token, sizeof id.token, 0) != sizeof id.token)
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, errno, "getrandom: %s", strerror(errno));
  gmi_fork_hold();
  id.fd = memfd_create("gemini-comm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  int error = errno;
  gmi_fork_close(id.fd);
  gmi_fork_let();
  if (id.fd < 0) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, error, "memfd_create: %s", strerror(error));
  region_t first = { .magic = MAGIC, .token = { id.token[0], id.token[1] }, .bytes = id.bytes, .ranks = ranks };
  /* Allocated now: a page that is missing later would end the process that touches it. */
  error = posix_fallocate(id.fd, 0, (off_t)id.bytes);
  if (!error && pwrite(id.fd, &first, sizeof first, 0) != sizeof first) error = errno;
  if (!error && fcntl(id.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) error = errno;
  if (error) {
    close_fd(id.fd);
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, error, "no shared memory of %" PRIu64 " bytes for %u ranks: %s", id.bytes,
                    ranks, strerror(error));
  }
  memset(id_out, 0, sizeof *id_out);
  memcpy(id_out, &id, sizeof id);
  return GEMINI_OK;
}

static gemini_status_t id_read(const gmi_comm_id_t *from, const gmi_comm_config_t *config, group_id_t *id_out) {
  group_id_t id;
  memcpy(&id, from, sizeof id);
  if (id.magic != MAGIC || !id.ranks || id.ranks > GMI_COMM_RANKS || id.bytes != data_at(id.ranks, CHANNELS))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "the id is not one of a group over shared memory");
  if (config->ranks != id.ranks)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "ranks is %u, the id is of a group of %u", config->ranks, id.ranks);
  if (config->rank >= id.ranks)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "rank is %u, must be below ranks, %u", config->rank, id.ranks);
  if (config->shard_ranks && id.ranks % config->shard_ranks)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "shard_ranks is %u, must divide ranks, %u", config->shard_ranks, id.ranks);
  *id_out = id;
  return GEMINI_OK;
}

/* Maps the memory. Its token tells it from another file that has the same descriptor by now. */
static gemini_status_t map_region(const group_id_t *id, region_t **region_out) {
  char path[48];
  bool own = id->pid == (uint32_t)getpid();
  snprintf(path, sizeof path, "/proc/%u/fd/%d", id->pid, id->fd);
  int fd = has_ended(id->pid, id->start) ? -1 : open(path, O_RDWR | O_CLOEXEC), error = errno;
  if (fd < 0 && (error == EACCES || error == EPERM))
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, error, "process %u, which made the id, is not of this user: %s", id->pid,
                    strerror(error));
  struct stat file;
  region_t *region = MAP_FAILED;
  if (fd >= 0 && !fstat(fd, &file) && file.st_size == (off_t)id->bytes)
    region = mmap(NULL, id->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (fd >= 0) close(fd);
  if (region != MAP_FAILED && (region->magic != MAGIC || memcmp(region->token, id->token, sizeof id->token))) {
    munmap(region, id->bytes);
    region = MAP_FAILED;
  }
  if (region == MAP_FAILED)
    return gmi_fail(own ? GEMINI_ERR_INVALID : GEMINI_ERR_PEER, 0,
                    "process %u, which made the id, has ended, or its rank 0 has joined already", id->pid);
  (void)madvise(region, id->bytes, MADV_DONTFORK);
  *region_out = region;
  return GEMINI_OK;
}

/* "2, 3": the ranks that have not joined. */
static void say_missing(const region_t *region, char *text_out, size_t size) {
  size_t length = 0;
  *text_out = 0;
  for (uint32_t r = 0; r < region->ranks && length + 16 < size; r++) {
    if (atomic_load_explicit(&region->members[r].state, memory_order_acquire) >= JOINED) continue;
    length += (size_t)snprintf(text_out + length, size - length, "%s%u", length ? ", " : "", r);
  }
}

static gemini_status_t wait_joined(shared_t *s) {
  region_t *region = s->region;
  uint64_t begin = gmi_now_ns();
  uint32_t joined;
  for (;;) { /* looks once at least: one of those that had joined may have ended before this rank came */
    joined = atomic_load_explicit(&region->joined, memory_order_acquire);
    gemini_status_t status = joined < s->ranks ? failure(region) : GEMINI_OK; /* else calls report it */
    if (status) return status;
    for (uint32_t r = 0; r < s->ranks; r++) {
      const member_t *member = &region->members[r];
      if (atomic_load_explicit(&member->state, memory_order_acquire) == JOINED && has_ended(member->pid, member->start))
        return fail_all(s, "rank %u (process %u) has ended before all ranks joined", r, member->pid);
    }
    if (joined >= s->ranks) break;
    if (gmi_now_ns() - begin >= s->deadline_ns) {
      char missing[160];
      say_missing(region, missing, sizeof missing);
      return fail_all(s, "rank %u waited %.3g s for ranks to join: of %u ranks these are missing: %s", s->rank,
                      (double)s->deadline_ns / 1e9, s->ranks, missing);
    }
    futex_wait(&region->joined, joined);
  }
  for (uint32_t r = 0; r < s->ranks; r++) {
    const uint32_t theirs = region->members[r].shard_ranks, ours = region->members[s->rank].shard_ranks;
    if (theirs != ours)
      return fail_all(s, "ranks differ: rank %u joins with shard_ranks %u, rank %u with %u", s->rank, ours, r, theirs);
  }
  return GEMINI_OK;
}

static gemini_status_t join(const group_id_t *id, const gmi_comm_config_t *config, shared_t *s) {
  gemini_status_t status = map_region(id, &s->region);
  if (status) return status;
  unsigned char *base = (unsigned char *)s->region;
  for (int c = 0; c < CHANNELS; c++) {
    s->posts[c] = (post_t *)(void *)(base + posts_at(id->ranks, c));
    s->data[c] = base + data_at(id->ranks, c);
  }
  s->rank = config->rank;
  s->ranks = id->ranks;
  s->deadline_ns = config->deadline_ns ? config->deadline_ns : DEADLINE_NS;
  const uint32_t shard = gmi_comm_shard_ranks(s->ranks, config->shard_ranks), own = s->rank % shard;
  s->teams[COLLECTIVES] = (team_t){ s->rank - own, 1, shard, own };
  s->teams[ACROSS] = (team_t){ own, shard, s->ranks / shard, s->rank / shard };
  s->teams[EXCHANGES] = (team_t){ 0, 1, s->ranks, s->rank };
  member_t *member = &s->region->members[s->rank];
  uint32_t absent = ABSENT;
  if (!atomic_compare_exchange_strong(&member->state, &absent, JOINING)) {
    gmi_fail(GEMINI_ERR_EXISTS, 0, "rank %u has joined already, in process %u", s->rank, member->pid);
    munmap(s->region, id->bytes);
    return GEMINI_ERR_EXISTS;
  }
  member->shard_ranks = shard;
  member->pid = (uint32_t)getpid();
  (void)process_life(member->pid, &member->start);
  atomic_store_explicit(&member->state, JOINED, memory_order_release);
  atomic_fetch_add_explicit(&s->region->joined, 1, memory_order_acq_rel);
  futex_wake(&s->region->joined);
  status = wait_joined(s);
  if (status) munmap(s->region, id->bytes);
  return status;
}

void gmi_comm_shared_id_end(const gmi_comm_id_t *from) {
  group_id_t id;
  memcpy(&id, from, sizeof id);
  if (id.magic == MAGIC && id.pid == (uint32_t)getpid()) close_fd(id.fd);
}

gemini_status_t gmi_comm_shared_join(const gmi_comm_id_t *from, const gmi_comm_config_t *config, gmi_comm_t *comm_out) {
  group_id_t id;
  gemini_status_t status = id_read(from, config, &id);
  if (status) return status;
  shared_t *s = calloc(1, sizeof *s);
  if (!s) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a communicator");
  status = join(&id, config, s);
  /* Without a region the descriptor is not the memory's, and may be another file's by now. */
  if (s->region && status != GEMINI_ERR_EXISTS && !config->rank) gmi_comm_shared_id_end(from);
  if (status) {
    free(s);
    return status;
  }
  const team_t *replica = &s->teams[COLLECTIVES];
  *comm_out = (gmi_comm_t){ &shared_ops, s, replica->own, replica->count };
  return GEMINI_OK;
}

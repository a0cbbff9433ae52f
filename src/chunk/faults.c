/* The handler of SIGSEGV that says which memory of an arena an access was to. SPDX-License-Identifier: Apache-2.0
 *
 * The handler runs in the middle of anything, so it takes no lock, allocates nothing, and writes with write(). It finds
 * the arena in a static table of address ranges, whose entries are atomic; other addresses are none of its business and
 * cost a walk through the table. The records behind an entry are read as they are: an arena that another thread
 * destroys at this moment may be freed meanwhile, and then the process dies of a second fault, without the text. Then
 * the handler that was there before gets the signal, or its default action is taken. */
#include "chunk/faults.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "base/fork.h"
#include "chunk/arena.h"

/* base is stored last (release) and cleared first: a handler that sees it sees the rest. */
typedef struct {
  _Atomic uint64_t base; /* 0: the entry is free */
  _Atomic uint64_t end;
  gmi_manager_t *_Atomic m;
  gmi_arena_t *_Atomic arena;
  _Atomic pid_t owner; /* the process that made it; a child of that has the entry, but not the memory */
} entry_t;
enum { ENTRIES = 4096 }; /* arenas that the handler knows; accesses to others are not explained */
static entry_t entries[ENTRIES];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows, and writing to the table */
static uint32_t managers;                                /* open ones with the flag */
/* The handlers that were there when ours was installed, the oldest first; read by the handler. They are several where
 * the program has installed one over ours, which calls ours, and ours was installed again over that. */
enum { INSTALLED_MOST = 8 };
static struct sigaction before[INSTALLED_MOST];
static uint32_t installed;

/* The latest call of the handler, for telling whether it is called once more for the same fault, by a handler that is
 * in before[]. Not thread-local, as that may allocate. Atomic: another thread's fault in between costs a round. */
static struct {
  _Atomic uintptr_t info, frame;
  _Atomic uint32_t depth;
} latest;

/* ---- a text without stdio */
typedef struct {
  char text[1024];
  size_t length;
} text_t;
static void put(text_t *t, const char *s) {
  for (; *s && t->length < sizeof t->text - 1; s++)
    t->text[t->length++] = (unsigned char)*s < ' ' || *s == 127 ? '?' : *s; /* names are any bytes */
}
static void put_number(text_t *t, uint64_t value, unsigned base) {
  char digits[24];
  size_t n = sizeof digits;
  digits[--n] = 0;
  do digits[--n] = "0123456789abcdef"[value % base];
  while ((value /= base) != 0);
  put(t, base == 16 ? "0x" : "");
  put(t, digits + n);
}

/* The shortest registered tensor at an offset, or NULL. A linear search: the sorted list may be changing. */
static gmi_tensor_t *tensor_at(gmi_manager_t *m, const gmi_arena_t *a, uint64_t offset) {
  gmi_tensor_t *best = NULL;
  for (uint32_t i = 0; i < m->tensors.high; i++) {
    gmi_tensor_t *t = &m->tensors.at[i];
    if (!gmi_tensor_alive(t) || t->arena != a->index || t->offset > offset || offset - t->offset >= t->size) continue;
    if (!best || t->size < best->size) best = t;
  }
  return best;
}

static void put_chunk(text_t *t, gmi_manager_t *m, const gmi_arena_t *a, uint64_t offset) {
  if (offset >= atomic_load(&a->size)) {
    put(t, " It is beyond what is used of the arena.");
    return;
  }
  uint64_t index = atomic_load(&m->cut.chunk_bytes) ? offset >> m->cut.chunk_shift : 0;
  const gmi_chunk_t *c = a->chunks && index < atomic_load(&a->chunk_count) ? &a->chunks[index] : NULL;
  if (!c) {
    put(t, " It was never acquired.");
    return;
  }
  put(t, " Its chunk ");
  put_number(t, index, 10);
  put(t, gmi_chunk_device_users(c) ? " is acquired on the device (has its acquire been waited for on this stream?)"
         : gmi_chunk_host_users(c) ? " is acquired on the host, which has another address, and not on the device"
                                   : " is not acquired");
  put(t, gmi_chunk_has(c, GMI_VALID_DEVICE) ? "; its bytes are on the device."
         : gmi_chunk_has(c, GMI_VALID_HOST) ? "; its bytes are on the host."
         : gmi_chunk_has(c, GMI_VALID_FILE) ? "; its bytes are in a file."
                                            : "; it has no bytes.");
}

static void explain(const entry_t *e, uint64_t address) {
  gmi_manager_t *m = atomic_load(&e->m);
  const gmi_arena_t *a = atomic_load(&e->arena);
  uint64_t offset = address - atomic_load(&e->base);
  text_t t = { .length = 0 };
  put(&t, "libgemini: access to address ");
  put_number(&t, address, 16);
  put(&t, ", offset ");
  put_number(&t, offset, 10);
  put(&t, " of arena ");
  put(&t, a->name);
  const gmi_tensor_t *tensor = tensor_at(m, a, offset);
  if (tensor) {
    put(&t, ", offset ");
    put_number(&t, offset - tensor->offset, 10);
    put(&t, " of tensor ");
    put(&t, m->tensors.at[tensor->base].name);
  }
  put(&t, ".");
  if (getpid() == atomic_load(&e->owner)) put_chunk(&t, m, a, offset);
  else put(&t, " It belongs to the process that forked this one, and is not there in this one.");
  t.text[t.length++] = '\n';
  ssize_t written = write(STDERR_FILENO, t.text, t.length);
  (void)written;
}

/* The same fault has the same record, further down the stack; another one, after a handler that has jumped out of the
 * fault before it, has neither or both at the same place. */
static uint32_t depth_of(const siginfo_t *info) {
  const uintptr_t record = (uintptr_t)info, frame = (uintptr_t)__builtin_frame_address(0);
  const bool again = atomic_load(&latest.info) == record && frame < atomic_load(&latest.frame);
  const uint32_t depth = again ? atomic_load(&latest.depth) + 1 : 0;
  atomic_store(&latest.info, record);
  atomic_store(&latest.frame, frame);
  atomic_store(&latest.depth, depth);
  return depth;
}
static void call_before(const struct sigaction *handler, int signal_number, siginfo_t *info, void *context) {
  if (handler && handler->sa_flags & SA_SIGINFO) {
    handler->sa_sigaction(signal_number, info, context);
  } else if (!handler || handler->sa_handler == SIG_DFL || handler->sa_handler == SIG_IGN) {
    /* The access is repeated on return, and the default action taken where it is. */
    signal(signal_number, SIG_DFL);
    if (info->si_code <= 0) raise(signal_number);
  } else {
    handler->sa_handler(signal_number);
  }
}
static void on_fault(int signal_number, siginfo_t *info, void *context) {
  int saved = errno;
  const uint32_t depth = depth_of(info);
  uint64_t address = (uint64_t)(uintptr_t)info->si_addr;
  bool sent = info->si_code <= 0; /* by a process, not by an access: it has no address */
  for (uint32_t i = 0; !sent && !depth && i < ENTRIES; i++) {
    uint64_t base = atomic_load_explicit(&entries[i].base, memory_order_acquire);
    if (!base || address < base || address >= atomic_load(&entries[i].end)) continue;
    explain(&entries[i], address);
    break;
  }
  errno = saved;
  call_before(depth < installed ? &before[installed - 1 - depth] : NULL, signal_number, info, context);
  atomic_store(&latest.info, 0); /* over; and this call's frame is above those of the handlers that it has called */
}

static void fork_prepare(void) { pthread_mutex_lock(&lock); }
static void fork_parent(void) { pthread_mutex_unlock(&lock); }
static void fork_child(void) { /* the parent's managers are none of the child's; the handler stays */
  pthread_mutex_init(&lock, NULL);
  managers = 0;
}
static const gmi_fork_ops_t fork_ops = { fork_prepare, fork_parent, fork_child };

gemini_status_t gmi_faults_open(gmi_manager_t *m) {
  if (!(m->config.flags & GEMINI_CONFIG_EXPLAIN_FAULTS)) return GEMINI_OK;
  gmi_fork_watch(&fork_ops);
  pthread_mutex_lock(&lock);
  gemini_status_t status = GEMINI_OK;
  struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK }, now;
  /* A handler of ours that is still there, because another one was installed over it, already has its `before`. */
  bool there = !sigaction(SIGSEGV, NULL, &now) && now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_fault;
  if (!managers && !there && installed < INSTALLED_MOST) {
    before[installed++] = now;
    if (sigaction(SIGSEGV, &action, NULL))
      installed--, status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, errno, "no handler of SIGSEGV");
  }
  managers += !status;
  pthread_mutex_unlock(&lock);
  m->arenas.explained = !status;
  return status;
}

void gmi_faults_close(gmi_manager_t *m) {
  if (!m->arenas.explained) return;
  pthread_mutex_lock(&lock);
  for (uint32_t i = 0; i < ENTRIES; i++)
    if (atomic_load(&entries[i].m) == m) atomic_store(&entries[i].base, 0);
  struct sigaction now;
  bool last = !--managers;
  /* A handler that was installed since stays, and may call ours, which stays in memory with the library. */
  if (last && !sigaction(SIGSEGV, NULL, &now) && now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_fault)
    (void)sigaction(SIGSEGV, &before[--installed], NULL);
  pthread_mutex_unlock(&lock);
  m->arenas.explained = false;
}

void gmi_faults_arena_add(gmi_manager_t *m, gmi_arena_t *a) {
  if (!m->arenas.explained || !a->base || (a->store != a->index && !gmi_arena_is_sharded(a))) return;
  uint64_t base = (uint64_t)(uintptr_t)a->base, end = base + a->capacity;
  pid_t me = getpid();
  pthread_mutex_lock(&lock);
  for (uint32_t k = 0; k < ENTRIES; k++) /* a parent's arena had these addresses there */
    if (atomic_load(&entries[k].owner) != me && atomic_load(&entries[k].base) < end &&
        atomic_load(&entries[k].end) > base)
      atomic_store(&entries[k].base, 0);
  uint32_t i = 0;
  while (i < ENTRIES && atomic_load(&entries[i].base)) i++;
  if (i < ENTRIES) {
    atomic_store(&entries[i].m, m);
    atomic_store(&entries[i].arena, a);
    atomic_store(&entries[i].owner, me);
    atomic_store(&entries[i].end, end);
    atomic_store_explicit(&entries[i].base, base, memory_order_release);
  }
  pthread_mutex_unlock(&lock);
}

void gmi_faults_arena_remove(gmi_manager_t *m, const gmi_arena_t *a) {
  if (!m->arenas.explained) return;
  pthread_mutex_lock(&lock);
  for (uint32_t i = 0; i < ENTRIES; i++)
    if (atomic_load(&entries[i].arena) == a) atomic_store(&entries[i].base, 0);
  pthread_mutex_unlock(&lock);
}

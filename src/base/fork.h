/* Keeps forked children from holding resources of their parent. SPDX-License-Identifier: Apache-2.0
 *
 * A child made by fork() has copies of the library's records, but none of the threads that work on them, and shares
 * open files with the parent: the lock of a checkpoint file, the ring of transfers and the memory of the simulated
 * device would live until both processes have ended. In the child these descriptors are therefore closed, and no handle
 * of the parent is valid. The memory of chunks does not exist there (MADV_DONTFORK). The child can open managers of its
 * own.
 *
 * A child that calls exec() needs none of this: all descriptors are closed on exec. */
#ifndef GMI_FORK_H
#define GMI_FORK_H

/* Called by fork() on the thread that forks: prepare before the fork, in the order of registration; afterwards parent
 * in the parent or child in the child, in reverse order. They serve locks in static storage: prepare takes a lock,
 * parent releases it, child initialises it anew. */
typedef struct gmi_fork_ops {
  void (*prepare)(void);
  void (*parent)(void);
  void (*child)(void);
} gmi_fork_ops_t;

/* Registers a watcher, of which there can be eight; a ninth one ends the process. ops is in static storage; registering
 * it again has no effect. Threads: any. */
void gmi_fork_watch(const gmi_fork_ops_t *ops);
/* gmi_fork_close() adds a descriptor to those that a child closes, gmi_fork_close_not() removes it. Negative ones are
 * ignored. If there is no memory to record a descriptor, a child keeps it open. Threads: any. */
void gmi_fork_close(int fd);
void gmi_fork_close_not(int fd);
/* Between these two calls no thread can fork. They may be nested. Put open() and gmi_fork_close() between them, and
 * likewise gmi_fork_close_not() and close(): then a child never misses an open descriptor, nor closes one whose number
 * belongs to another file by now. */
void gmi_fork_hold(void);
void gmi_fork_let(void);

#endif

/* What a forked child must not keep of its parent. SPDX-License-Identifier: Apache-2.0
 *
 * A child made by fork() has copies of the library's records, without the threads that work on them, and shares its
 * open files with the parent: a kept file's lock, the ring of transfers and the memory of the simulated device would
 * live until both have ended. So in the child such descriptors are closed, and no handle of the parent's is valid. The
 * memory that chunks lie in does not exist there (MADV_DONTFORK). The child can open managers of its own.
 *
 * Nothing of this is needed for, or done to, a child that goes on with exec(): descriptors are closed on exec. */
#ifndef GMI_FORK_H
#define GMI_FORK_H

/* Called by fork(), on the thread that forks: prepare before it, in the order of registration, and then in the reverse
 * order parent or child. For locks of static storage: prepare takes them, parent gives them back, child makes them
 * anew. */
typedef struct gmi_fork_ops {
  void (*prepare)(void);
  void (*parent)(void);
  void (*child)(void);
} gmi_fork_ops_t;

/* ops: static storage; the same again has no effect. Any thread. */
void gmi_fork_watch(const gmi_fork_ops_t *ops);
/* Descriptors that are closed in a child, from the call on and until the other. Those below 0 are ignored. A descriptor
 * that there is no memory to remember stays open in a child. Any thread. */
void gmi_fork_close(int fd);
void gmi_fork_close_not(int fd);
/* No thread forks between these two calls, which may be nested. Callers put open() and gmi_fork_close() between them,
 * and likewise gmi_fork_close_not() and close(), so that every descriptor that is open is also remembered. */
void gmi_fork_hold(void);
void gmi_fork_let(void);

#endif

/* Starts threads with most signals blocked, and lowers priorities. SPDX-License-Identifier: Apache-2.0
 *
 * A thread inherits the mask of its creator, so the mask is set around pthread_create(): there is no moment in which
 * the new thread could run one of the program's handlers. */
#include "base/thread.h"

#include <errno.h>
#include <signal.h>
#include <sys/resource.h>

int gmi_thread_start(pthread_t *thread, void *(*run)(void *), void *user) {
  static const int own[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF };
  sigset_t others, before;
  sigfillset(&others);
  for (size_t i = 0; i < sizeof own / sizeof *own; i++) sigdelset(&others, own[i]);
  pthread_sigmask(SIG_SETMASK, &others, &before);
  int error = pthread_create(thread, NULL, run, user);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return error;
}

/* Linux keeps a nice value for each thread; 0 is the calling one. */
void gmi_thread_give_way(void) {
  errno = 0;
  const int nice = getpriority(PRIO_PROCESS, 0);
  if (nice != -1 || !errno) (void)setpriority(PRIO_PROCESS, 0, nice + GMI_THREAD_NICER); /* more than 19 is 19 */
}

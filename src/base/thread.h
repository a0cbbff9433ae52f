/* Starting threads of the library. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_THREAD_H
#define GMI_THREAD_H

#include <pthread.h>

/* pthread_create() for a thread that receives none of the program's signals, except those that it causes itself
 * (SIGSEGV, ...) and SIGPROF of profilers. Returns 0 or an errno. */
int gmi_thread_start(pthread_t *thread, void *(*run)(void *), void *user);

/* Lowers the calling thread's priority (its nice value rises by GMI_THREAD_NICER), for work of which there is more than
 * cores: on its core others then run as soon as they have something to do, where equals would wait some ms for each
 * other. */
enum { GMI_THREAD_NICER = 10 };
void gmi_thread_give_way(void);

#endif

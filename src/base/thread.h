/* Starting threads of the library. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_THREAD_H
#define GMI_THREAD_H

#include <pthread.h>

/* pthread_create() for a thread that receives none of the program's signals, except those that it causes itself
 * (SIGSEGV, ...) and SIGPROF of profilers. Returns 0 or an errno. */
int gmi_thread_start(pthread_t *thread, void *(*run)(void *), void *user);

#endif

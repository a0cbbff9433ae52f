/* Threads of the library's own. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_THREAD_H
#define GMI_THREAD_H

#include <pthread.h>

/* pthread_create() for a thread that takes none of the program's signals, but those that it causes itself and those of
 * profilers. Returns an errno. */
int gmi_thread_start(pthread_t *thread, void *(*run)(void *), void *user);

#endif

/* Ranges that Nsight Systems shows, for ops and moves: NVTX, by a library of the CUDA Toolkit or of PyTorch's packages
 * that is opened at run time. Without one, nothing. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_NVTX_H
#define GMI_NVTX_H

#include <stdbool.h>

/* Looks for the library, once a process. Threads: any. */
void gmi_nvtx_open(void);
/* Do ranges go anywhere? */
bool gmi_nvtx_on(void);
/* Ranges nest, on each thread by itself; name is copied. Without gmi_nvtx_on() they do nothing. Threads: any. */
void gmi_nvtx_push(const char *name);
void gmi_nvtx_pop(void);

#endif

/* NVTX ranges, which Nsight Systems shows, for operators and moves. The NVTX library of the CUDA Toolkit or of
 * PyTorch's packages is opened at run time; without one, ranges have no effect. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_NVTX_H
#define GMI_NVTX_H

#include <stdbool.h>

/* Looks for the library, once per process. Threads: any. */
void gmi_nvtx_open(void);
/* Was a library found? */
bool gmi_nvtx_on(void);
/* Begin and end a range. Ranges nest, separately for each thread; name is copied. No effect unless gmi_nvtx_on().
 * Threads: any. */
void gmi_nvtx_push(const char *name);
void gmi_nvtx_pop(void);

#endif

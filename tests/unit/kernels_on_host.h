/* The kernels of bindings/update/kernels.cu on the host, for test_fused_kernels.c. SPDX-License-Identifier: Apache-2.0 */
#ifndef KERNELS_ON_HOST_H
#define KERNELS_ON_HOST_H

#include "update/update.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Runs a kernel of AdamW (gmi_adamw, gmi_narrow or gmi_blocks) and then gmi_update_sum, which leaves the sum of squares
 * in sums[0]. sums: gemini_update_sums(count) elements. No array is of fp16. One call at a time. */
void kernel_on_host(const char *name, const gmi_adamw_t *k, const gmi_arrays_t *a, uint64_t count, double *sums);

#ifdef __cplusplus
}
#endif

#endif

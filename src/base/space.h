/* Zeroed address space that takes memory only where it is touched: for arrays that are reserved at their largest size
 * and rarely fill it. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_SPACE_H
#define GMI_SPACE_H

#include <stdint.h>

void *gmi_space(uint64_t bytes);                  /* all zeros; NULL: no address space is left */
void gmi_space_free(void *space, uint64_t bytes); /* NULL is accepted */

#endif

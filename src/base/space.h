/* Address space that costs memory only where it is touched. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_SPACE_H
#define GMI_SPACE_H

#include <stdint.h>

void *gmi_space(uint64_t bytes);                  /* zeros; NULL when there is none */
void gmi_space_free(void *space, uint64_t bytes); /* NULL is accepted */

#endif

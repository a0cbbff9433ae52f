/* Public handles and their 64-bit values. A handle has its value in the form of a pointer, which is never followed.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_HANDLE_H
#define GMI_HANDLE_H

#include <stdint.h>

static inline uint64_t gmi_id(const void *handle) { return (uintptr_t)handle; }
static inline void *gmi_handle_of(uint64_t id) { return (void *)(uintptr_t)id; }

#endif

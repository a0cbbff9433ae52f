/* What loops over bytes tell ThreadSanitizer: one call for all the bytes instead of one for every value, which takes it
 * a small part of the time. In other builds there is nothing here. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_BASE_RACE_H
#define GMI_BASE_RACE_H

#include <stddef.h>

/* GMI_UNTOLD: before a function whose accesses ThreadSanitizer is not told of. Its callers say what it reads and writes
 * of others' memory, by gmi_reads() and gmi_writes(). Functions that are to be inlined into it need it, too. */
#ifdef __SANITIZE_THREAD__
#define GMI_UNTOLD __attribute__((no_sanitize("thread")))
void __tsan_read_range(void *bytes, size_t size_bytes);
void __tsan_write_range(void *bytes, size_t size_bytes);
static inline void gmi_reads(const void *bytes, size_t size_bytes) { __tsan_read_range((void *)bytes, size_bytes); }
static inline void gmi_writes(void *bytes, size_t size_bytes) { __tsan_write_range(bytes, size_bytes); }
#else
#define GMI_UNTOLD
static inline void gmi_reads(const void *bytes, size_t size_bytes) { (void)bytes, (void)size_bytes; }
static inline void gmi_writes(void *bytes, size_t size_bytes) { (void)bytes, (void)size_bytes; }
#endif

#endif

/* CRC-32C, the checksum of blocks and of the index. SPDX-License-Identifier: Apache-2.0
 *
 * Castagnoli's polynomial, reflected, as in RFC 3720, appendix B.4. The processor's crc32 instruction is used where it
 * has one. Threads: any. */
#ifndef GMI_CHECKSUM_H
#define GMI_CHECKSUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The checksum of all bytes so far. crc: that of the preceding bytes; 0 at the beginning. */
uint32_t gmi_crc32c(uint32_t crc, const void *bytes, size_t size_bytes);
/* The start value of a block's checksum: that of its generation as 8 little-endian bytes. The block's bytes follow. */
uint32_t gmi_crc32c_generation(uint64_t generation);

/* The two implementations, for tests. gmi_crc32c_instruction() may be called only where gmi_crc32c_accelerated(). */
uint32_t gmi_crc32c_tables(uint32_t crc, const void *bytes, size_t size_bytes);
uint32_t gmi_crc32c_instruction(uint32_t crc, const void *bytes, size_t size_bytes);
bool gmi_crc32c_accelerated(void);

#endif

/* CRC-32C, the checksum of blocks and of the index. SPDX-License-Identifier: Apache-2.0
 *
 * Castagnoli's polynomial, reflected, as in RFC 3720, appendix B.4. Uses the processor's instruction where it has
 * one. */
#ifndef GMI_CHECKSUM_H
#define GMI_CHECKSUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Goes on from crc, that of the bytes before; 0 at the beginning. */
uint32_t gmi_crc32c(uint32_t crc, const void *bytes, size_t size_bytes);
/* A block's checksum begins with its generation, as 8 bytes, the lowest first; its bytes follow. */
uint32_t gmi_crc32c_generation(uint64_t generation);

/* The ways of doing it, for tests: tables; the instruction, to be called only where accelerated() is true. */
uint32_t gmi_crc32c_tables(uint32_t crc, const void *bytes, size_t size_bytes);
uint32_t gmi_crc32c_instruction(uint32_t crc, const void *bytes, size_t size_bytes);
bool gmi_crc32c_accelerated(void);

#endif

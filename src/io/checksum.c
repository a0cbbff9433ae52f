/* CRC-32C: by the processor's instruction in three interleaved streams, or by tables.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The crc32 instruction has a latency of three cycles and a throughput of one per cycle, so three independent streams
 * keep it busy. Each stream sums a stretch of its own. The sums are combined as polynomials over GF(2): the sum of a
 * stretch that is followed by n more bits is multiplied by x^n. To multiply by x^n modulo the polynomial, the sum is
 * multiplied without carries by x^(n-33) modulo the polynomial, and the 64-bit product is fed to the crc32 instruction,
 * which reduces it and multiplies by x^32; the one bit that is missing comes from reflection (a product of reflected
 * polynomials is shifted by one).
 *
 * Tables are filled once, by the first caller (pthread_once). No other shared state; any thread. */
#include "io/checksum.h"

#include <pthread.h>
#include <string.h>

#include "base/race.h"

#define POLYNOMIAL UINT32_C(0x82f63b78) /* reflected: x^31 is the lowest bit */

static pthread_once_t once = PTHREAD_ONCE_INIT;
/* tables[k][b]: the contribution of byte b to the sum when k more bytes follow it. The tables and `best` are written in
 * prepare() only, before pthread_once() returns in any thread. */
static uint32_t tables[8][256];
static uint32_t (*best)(uint32_t crc, const void *bytes, size_t size_bytes);
static void prepare(void);

#if defined(__x86_64__)
#include <immintrin.h>

/* Bytes of a stretch. Combining costs the same whatever the length, so long stretches are used first, then short ones
 * for the rest. */
enum { LONG_BYTES = 4096, SHORT_BYTES = 256 };
/* The factors x^(n-33): [0] for the second stream, which one stretch follows; [1] for the first, which two follow. */
static uint32_t after_long[2], after_short[2];

/* x^bits modulo the polynomial. */
static uint32_t power_of_x(uint64_t bits) {
  uint32_t power = UINT32_C(1) << 31;
  for (; bits; bits--) power = power >> 1 ^ (power & 1 ? POLYNOMIAL : 0);
  return power;
}

GMI_UNTOLD __attribute__((target("sse4.2,pclmul"))) static inline uint64_t shifted(uint32_t crc, uint32_t power) {
  __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128((int)crc), _mm_cvtsi32_si128((int)power), 0);
  return (uint64_t)_mm_cvtsi128_si64(product);
}

GMI_UNTOLD static inline uint64_t word_at(const uint8_t *bytes) {
  uint64_t word;
  memcpy(&word, bytes, sizeof word);
  return word;
}

/* Sums three neighbouring stretches. The shifted sums of the first two are XORed into the last word of the third, where
 * the instruction reduces them together with it. */
GMI_UNTOLD __attribute__((target("sse4.2,pclmul"), always_inline)) static inline uint64_t three(
    uint64_t crc, const uint8_t *p, size_t stretch_bytes, const uint32_t after[2]) {
  uint64_t second = 0, third = 0;
  const uint8_t *end = p + stretch_bytes - 8;
  for (; p < end; p += 8) {
    crc = _mm_crc32_u64(crc, word_at(p));
    second = _mm_crc32_u64(second, word_at(p + stretch_bytes));
    third = _mm_crc32_u64(third, word_at(p + 2 * stretch_bytes));
  }
  crc = _mm_crc32_u64(crc, word_at(p));
  second = _mm_crc32_u64(second, word_at(p + stretch_bytes));
  uint64_t others = shifted((uint32_t)crc, after[1]) ^ shifted((uint32_t)second, after[0]);
  return _mm_crc32_u64(third, word_at(p + 2 * stretch_bytes) ^ others);
}

GMI_UNTOLD __attribute__((target("sse4.2,pclmul"))) uint32_t gmi_crc32c_instruction(uint32_t crc, const void *bytes,
                                                                                    size_t size_bytes) {
  pthread_once(&once, prepare);
  gmi_reads(bytes, size_bytes);
  const uint8_t *p = bytes;
  uint64_t sum = ~crc;
  for (; size_bytes && (uintptr_t)p % 8; size_bytes--) sum = _mm_crc32_u8((uint32_t)sum, *p++);
  for (; size_bytes >= 3 * LONG_BYTES; p += 3 * LONG_BYTES, size_bytes -= 3 * LONG_BYTES)
    sum = three(sum, p, LONG_BYTES, after_long);
  for (; size_bytes >= 3 * SHORT_BYTES; p += 3 * SHORT_BYTES, size_bytes -= 3 * SHORT_BYTES)
    sum = three(sum, p, SHORT_BYTES, after_short);
  for (; size_bytes >= 8; p += 8, size_bytes -= 8) sum = _mm_crc32_u64(sum, word_at(p));
  for (; size_bytes; size_bytes--) sum = _mm_crc32_u8((uint32_t)sum, *p++);
  return ~(uint32_t)sum;
}
#endif

bool gmi_crc32c_accelerated(void) {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
#else
  return false;
#endif
}

#if !defined(__x86_64__)
uint32_t gmi_crc32c_instruction(uint32_t crc, const void *bytes, size_t size_bytes) {
  return gmi_crc32c_tables(crc, bytes, size_bytes);
}
#endif

static void prepare(void) {
  for (uint32_t b = 0; b < 256; b++) {
    uint32_t sum = b;
    for (int k = 0; k < 8; k++) sum = sum >> 1 ^ (sum & 1 ? POLYNOMIAL : 0);
    tables[0][b] = sum;
  }
  for (int k = 1; k < 8; k++)
    for (uint32_t b = 0; b < 256; b++) tables[k][b] = tables[k - 1][b] >> 8 ^ tables[0][tables[k - 1][b] & 255];
#if defined(__x86_64__)
  for (uint64_t k = 0; k < 2; k++) {
    after_long[k] = power_of_x((k + 1) * LONG_BYTES * 8 - 33);
    after_short[k] = power_of_x((k + 1) * SHORT_BYTES * 8 - 33);
  }
#endif
  best = gmi_crc32c_accelerated() ? gmi_crc32c_instruction : gmi_crc32c_tables;
}

GMI_UNTOLD uint32_t gmi_crc32c_tables(uint32_t crc, const void *bytes, size_t size_bytes) {
  pthread_once(&once, prepare);
  gmi_reads(bytes, size_bytes);
  const uint8_t *p = bytes;
  uint32_t sum = ~crc;
  for (; size_bytes >= 8; p += 8, size_bytes -= 8) {
    sum ^= (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    sum = tables[7][sum & 255] ^ tables[6][sum >> 8 & 255] ^ tables[5][sum >> 16 & 255] ^ tables[4][sum >> 24] ^
          tables[3][p[4]] ^ tables[2][p[5]] ^ tables[1][p[6]] ^ tables[0][p[7]];
  }
  for (; size_bytes; size_bytes--) sum = sum >> 8 ^ tables[0][(sum ^ *p++) & 255];
  return ~sum;
}

uint32_t gmi_crc32c(uint32_t crc, const void *bytes, size_t size_bytes) {
  pthread_once(&once, prepare);
  return best(crc, bytes, size_bytes);
}

uint32_t gmi_crc32c_generation(uint64_t generation) {
  uint8_t bytes[8];
  for (int k = 0; k < 8; k++) bytes[k] = (uint8_t)(generation >> 8 * k);
  return gmi_crc32c(0, bytes, sizeof bytes);
}

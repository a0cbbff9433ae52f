/* CRC-32C: published values, and both ways against a bit at a time. SPDX-License-Identifier: Apache-2.0 */
#include <time.h>

#include "../check.h"
#include "io/checksum.h"

typedef uint32_t (*way_t)(uint32_t crc, const void *bytes, size_t size_bytes);
static way_t ways[3] = { gmi_crc32c, gmi_crc32c_tables };
static int way_count = 2;

/* The definition: the remainder of the message, with its first 32 bits and the result inverted. */
static uint32_t reference(uint32_t crc, const uint8_t *bytes, size_t size_bytes) {
  crc = ~crc;
  for (size_t i = 0; i < size_bytes; i++) {
    crc ^= bytes[i];
    for (int k = 0; k < 8; k++) crc = crc >> 1 ^ (crc & 1 ? UINT32_C(0x82f63b78) : 0);
  }
  return ~crc;
}

static uint8_t *random_bytes(size_t size, uint64_t seed) {
  uint8_t *bytes = malloc(size);
  CHECK(bytes);
  for (size_t i = 0; i < size; i++) bytes[i] = (uint8_t)(check_random(&seed) >> 56);
  return bytes;
}

/* RFC 3720, appendix B.4; and the sum of "123456789" that catalogues of CRCs name. */
static void test_crc32c_of_published_messages(void) {
  uint8_t bytes[32];
  static const uint8_t read_command[48] = {
    0x01, 0xc0, [16] = 0x14, [22] = 0x04, [27] = 0x14, [31] = 0x18, [32] = 0x28, [40] = 0x02
  };
  for (int w = 0; w < way_count; w++) {
    memset(bytes, 0, sizeof bytes);
    CHECK_EQ(ways[w](0, bytes, 32), UINT32_C(0x8a9136aa));
    memset(bytes, 0xff, sizeof bytes);
    CHECK_EQ(ways[w](0, bytes, 32), UINT32_C(0x62a8ab43));
    for (int i = 0; i < 32; i++) bytes[i] = (uint8_t)i;
    CHECK_EQ(ways[w](0, bytes, 32), UINT32_C(0x46dd794e));
    for (int i = 0; i < 32; i++) bytes[i] = (uint8_t)(31 - i);
    CHECK_EQ(ways[w](0, bytes, 32), UINT32_C(0x113fdb5c));
    CHECK_EQ(ways[w](0, read_command, 48), UINT32_C(0xd9963a56));
    CHECK_EQ(ways[w](0, "123456789", 9), UINT32_C(0xe3069283));
    CHECK_EQ(ways[w](0, bytes, 0), 0);
  }
}

static void test_crc32c_of_every_length_and_alignment(void) {
  uint8_t *bytes = random_bytes(400, 1);
  for (size_t at = 0; at < 16; at++)
    for (size_t size = 0; size <= 300; size++) {
      uint32_t expected = reference(0, bytes + at, size);
      for (int w = 0; w < way_count; w++) CHECK_EQ(ways[w](0, bytes + at, size), expected);
    }
  free(bytes);
}

/* Around the lengths of the stretches that are summed side by side, and far past them. */
static void test_crc32c_of_long_messages(void) {
  size_t most = (1 << 20) + 64;
  uint8_t *bytes = random_bytes(most, 2);
  static const size_t around[] = { 256, 512, 768, 1536, 4096, 8192, 12288, 24576, 12288 + 768, 100000, 1 << 20 };
  for (size_t k = 0; k < sizeof around / sizeof *around; k++)
    for (int more = -9; more <= 9; more++)
      for (size_t at = 0; at < 8; at += 5) {
        size_t size = (size_t)((int)around[k] + more);
        if (around[k] > 50000 && more % 9) continue;
        uint32_t expected = reference(0, bytes + at, size);
        for (int w = 0; w < way_count; w++) CHECK_EQ(ways[w](0, bytes + at, size), expected);
      }
  free(bytes);
}

static void test_crc32c_in_pieces_is_that_of_the_whole(void) {
  size_t size = 70000;
  uint8_t *bytes = random_bytes(size, 3);
  uint32_t whole = reference(0, bytes, size);
  uint64_t random = 4;
  for (int round = 0; round < 50; round++)
    for (int w = 0; w < way_count; w++) {
      uint32_t crc = 0;
      for (size_t at = 0; at < size;) {
        size_t piece = check_random(&random) % (round % 2 ? 30000 : 300);
        if (piece > size - at) piece = size - at;
        crc = ways[w](crc, bytes + at, piece);
        at += piece;
      }
      CHECK_EQ(crc, whole);
    }
  free(bytes);
}

static void test_crc32c_generation_is_that_of_its_bytes(void) {
  static const uint8_t bytes[8] = { 0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01 };
  CHECK_EQ(gmi_crc32c_generation(UINT64_C(0x0123456789abcdef)), reference(0, bytes, 8));
  CHECK(gmi_crc32c_generation(1) != gmi_crc32c_generation(2));
}

/* Not checked but shown: how fast. */
static void test_crc32c_speed(void) {
  size_t size = 4 << 20;
  uint8_t *bytes = random_bytes(size, 5);
  static const char *const names[] = { "chosen", "tables", "instruction" };
  for (int w = 0; w < way_count; w++) {
    double fastest = 1e9;
    uint32_t crc = 0;
    for (int round = 0; round < 5; round++) {
      struct timespec begin, end;
      clock_gettime(CLOCK_MONOTONIC, &begin);
      crc = ways[w](crc, bytes, size);
      clock_gettime(CLOCK_MONOTONIC, &end);
      double s = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
      if (s < fastest) fastest = s;
    }
    fprintf(stderr, "    %-12s %5.1f GB/s (%08x)\n", names[w], 1e-9 * (double)size / fastest, crc);
  }
  free(bytes);
}

int main(void) {
  if (gmi_crc32c_accelerated()) ways[way_count++] = gmi_crc32c_instruction;
  RUN(test_crc32c_of_published_messages);
  RUN(test_crc32c_of_every_length_and_alignment);
  RUN(test_crc32c_of_long_messages);
  RUN(test_crc32c_in_pieces_is_that_of_the_whole);
  RUN(test_crc32c_generation_is_that_of_its_bytes);
  RUN(test_crc32c_speed);
  return check_done();
}

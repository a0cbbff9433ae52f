/* Shared by integration tests: a manager on the simulated device, accesses, byte patterns, and status checks that print
 * the library's error. SPDX-License-Identifier: Apache-2.0 */
#ifndef WORLD_H
#define WORLD_H

#include <stdbool.h>
#include <unistd.h>

#include "../check.h"
#include "../handles.h"
#include "../system.h"
#include "figures.h"
#include "gemini.h"

static inline gemini_error_info_t world_error(void) { /* this thread's last error */
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  CHECK_EQ(gemini_last_error(&info), GEMINI_OK);
  return info;
}

#define CHECK_STATUS(call, expected)                                                                                  \
  do {                                                                                                                \
    gemini_status_t check_s = (call);                                                                                 \
    if (check_s != (expected)) {                                                                                      \
      fprintf(stderr, "%s:%d: %s: %s is %d, expected %s\n", __FILE__, __LINE__, __func__, #call, check_s, #expected); \
      fprintf(stderr, "  last error: %s: %s\n", world_error().operation, world_error().message);                      \
      exit(1);                                                                                                        \
    }                                                                                                                 \
  } while (0)
#define CHECK_OK(call) CHECK_STATUS(call, GEMINI_OK)

#define WORLD_CHUNK UINT64_C(65536)

/* A test that needs more fields in world_t defines WORLD_MORE before it includes this file. */
#ifndef WORLD_MORE
#define WORLD_MORE
#endif
typedef struct {
  gemini_manager_t mgr;
  gemini_stream_t stream;
  char dir[64]; /* directory of the file tier, made by world_open(); "" = none */
  WORLD_MORE
} world_t;

/* Takes budgets in chunks of 64 KiB; file_chunks 0: no file tier. */
static inline gemini_config_t world_config(uint64_t device_chunks, uint64_t host_chunks, uint64_t file_chunks) {
  gemini_config_t c = GEMINI_CONFIG_INIT;
  c.device_bytes = device_chunks * WORLD_CHUNK;
  c.host_bytes = host_chunks * WORLD_CHUNK;
  c.file_bytes = file_chunks * WORLD_CHUNK;
  c.chunk_bytes = WORLD_CHUNK;
  c.update_threads = 1;
  return c;
}

static inline world_t world_open(gemini_config_t c) {
  world_t w = { 0 };
  if (c.file_bytes && !c.file_dir) {
    dir_make(w.dir);
    c.file_dir = w.dir;
  }
  CHECK_OK(gemini_manager_open(&c, &w.mgr));
  CHECK_OK(gemini_stream_create(w.mgr, &w.stream));
  return w;
}

static inline void world_close(world_t *w) {
  CHECK_OK(gemini_manager_close(w->mgr));
  if (*w->dir) CHECK_EQ(rmdir(w->dir), 0); /* fails if the library left a file in it */
}

/* like, reuse: as in gemini_arena_config_t; an arena or 0. */
static inline gemini_arena_t world_arena(const world_t *w, uint32_t kind, uint32_t element_bytes, const char *name,
                                         gemini_arena_t like, gemini_arena_t reuse) {
  gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
  c.kind = kind;
  c.element_bytes = element_bytes;
  c.name = name;
  c.like = like;
  c.reuse = reuse;
  c.capacity_bytes = (UINT64_C(16) << 20) * element_bytes;
  gemini_arena_t arena;
  CHECK_OK(gemini_arena_create(w->mgr, &c, &arena));
  return arena;
}

static inline gemini_tensor_t world_tensor(const world_t *w, gemini_arena_t arena, const char *name, uint64_t size) {
  gemini_tensor_t t;
  CHECK_OK(gemini_tensor_register(w->mgr, arena, name, size, GEMINI_OFFSET_NEXT, &t));
  return t;
}

static inline figures_t world_stats(const world_t *w) {
  figures_t s = { 0 };
  CHECK_OK(figures_read(w->mgr, &s));
  return s;
}
static inline gemini_tensor_info_t world_tensor_info(const world_t *w, gemini_tensor_t t) {
  gemini_tensor_info_t info = GEMINI_TENSOR_INFO_INIT;
  CHECK_OK(gemini_tensor_info(w->mgr, t, &info));
  return info;
}
/* Bytes of an object that a tier holds. Bytes with copies in several tiers count for the highest: device, host, file. */
static inline uint64_t world_tier_bytes(const world_t *w, gemini_object_t object, uint32_t tier) {
  gemini_access_t all = ACCESS(object, 0, 0, 0, tier);
  uint64_t bytes;
  CHECK_OK(gemini_tier_bytes(w->mgr, &all, &bytes));
  return bytes;
}
#define world_tier_bytes(w, object, tier) world_tier_bytes(w, OBJECT(object), tier)
static inline gemini_arena_info_t world_arena_info(const world_t *w, gemini_arena_t a) {
  gemini_arena_info_t info = GEMINI_ARENA_INFO_INIT;
  CHECK_OK(gemini_arena_info(w->mgr, a, &info));
  return info;
}

/* ---- accesses and contents; offset 0 and size 0: the whole object
 *
 * Each function below that takes an object is also a macro, which accepts a tensor or an arena. */
static inline gemini_access_t world_part(gemini_object_t object, uint64_t offset, uint64_t size, uint32_t mode,
                                         uint32_t tier) {
  return (gemini_access_t)ACCESS(object, offset, size, mode, tier);
}
#define world_part(object, ...) world_part(OBJECT(object), __VA_ARGS__)
static inline gemini_access_t world_whole(gemini_object_t object, uint32_t mode, uint32_t tier) {
  return world_part(object, 0, 0, mode, tier);
}
#define world_whole(object, ...) world_whole(OBJECT(object), __VA_ARGS__)

/* Byte i of the pattern of a seed; seed 0: all bytes are zero. */
OWN_MEMORY static inline uint8_t world_byte(uint64_t seed, uint64_t i) {
  uint64_t x = (i + 1) * UINT64_C(0x9e3779b97f4a7c15) + seed * UINT64_C(0xd1342543de82ef95);
  return seed ? (uint8_t)((x ^ x >> 29) >> 17) : 0;
}

/* Bytes of the pattern from offset on, into memory of the caller's own. */
OWN_MEMORY static inline void world_pattern(uint8_t *own, uint64_t offset, uint64_t size, uint64_t seed) {
  for (uint64_t i = 0; i < size; i++) own[i] = world_byte(seed, offset + i);
}
enum { WORLD_PIECE = 4096 }; /* bytes that are compared with the pattern, or written, together */
static inline void world_write(void *at, uint64_t offset, uint64_t size, uint64_t seed) {
  uint8_t own[WORLD_PIECE];
  for (uint64_t done = 0, part; done < size; done += part) {
    part = size - done < WORLD_PIECE ? size - done : WORLD_PIECE;
    world_pattern(own, offset + done, part, seed);
    memcpy((uint8_t *)at + done, own, part);
  }
}
/* Are the bytes what world_write() wrote? Prints the first one that is not. */
static inline bool world_reads(const void *at, uint64_t offset, uint64_t size, uint64_t seed) {
  const uint8_t *bytes = at;
  uint8_t own[WORLD_PIECE];
  uint64_t i = 0;
  for (uint64_t part; i < size; i += part) {
    part = size - i < WORLD_PIECE ? size - i : WORLD_PIECE;
    world_pattern(own, offset + i, part, seed);
    if (memcmp(bytes + i, own, part) != 0) break;
  }
  while (i < size && bytes[i] == world_byte(seed, offset + i)) i++;
  if (i == size) return true;
  fprintf(stderr, "byte %" PRIu64 " is %#x, expected %#x of seed %" PRIu64 "\n", offset + i, bytes[i],
          world_byte(seed, offset + i), seed);
  return false;
}

/* Acquires size bytes of an object on tier, writes the pattern from this thread, and releases them. */
static inline void world_fill(const world_t *w, gemini_object_t object, uint64_t offset, uint64_t size, uint32_t tier,
                              uint64_t seed) {
  gemini_access_t a = world_part(object, offset, size, GEMINI_WRITE, tier);
  CHECK_OK(gemini_acquire(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
  world_write(a.ptr, offset, size, seed);
  CHECK_OK(gemini_release(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
}
#define world_fill(w, object, ...) world_fill(w, OBJECT(object), __VA_ARGS__)
/* Are the bytes what world_fill() wrote? Acquires them on tier, which moves them there. */
static inline bool world_holds_on(const world_t *w, gemini_object_t object, uint64_t offset, uint64_t size,
                                  uint32_t tier, uint64_t seed) {
  gemini_access_t a = world_part(object, offset, size, GEMINI_READ, tier);
  CHECK_OK(gemini_acquire(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
  bool right = world_reads(a.ptr, offset, size, seed);
  CHECK_OK(gemini_release(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
  return right;
}
#define world_holds_on(w, object, ...) world_holds_on(w, OBJECT(object), __VA_ARGS__)
static inline bool world_holds(const world_t *w, gemini_object_t object, uint64_t offset, uint64_t size,
                               uint64_t seed) {
  return world_holds_on(w, object, offset, size, GEMINI_TIER_HOST, seed);
}
#define world_holds(w, object, ...) world_holds(w, OBJECT(object), __VA_ARGS__)
#endif

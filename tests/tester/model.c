/* The model's rules. SPDX-License-Identifier: Apache-2.0 */
#include "model.h"

#include <math.h>
#include <string.h>

/* ---- bytes */
static uint64_t pattern_word(uint64_t seed, uint64_t index) {
  uint64_t x = (index + 1) * UINT64_C(0x9e3779b97f4a7c15) ^ seed * UINT64_C(0xd1342543de82ef95);
  x = (x ^ x >> 29) * UINT64_C(0xbf58476d1ce4e5b9);
  return (x ^ x >> 32) & UINT64_C(0xbfffbfffbfffbfff); /* no exponent is all ones */
}
void pattern_fill(uint8_t *to, uint64_t at, uint64_t size, uint64_t seed) {
  if (!seed) {
    memset(to, 0, size);
    return;
  }
  for (uint64_t i = 0; i < size;) {
    uint64_t word = pattern_word(seed, (at + i) / 8), skip = (at + i) % 8, n = 8 - skip;
    if (n > size - i) n = size - i;
    if (n == 8) {
      memcpy(to + i, &word, 8);
    } else {
      word >>= skip * 8;
      memcpy(to + i, &word, n);
    }
    i += n;
  }
}

/* ---- ranges */
range_t range_of(const part_t *p, bool is_arena, int entry, uint64_t offset, uint64_t size) {
  range_t r = { .is_arena = is_arena, .entry = entry, .offset = offset, .size = size };
  uint64_t start = 0, limit;
  if (is_arena) {
    const arena_t *a = &p->arenas[entry % ARENAS];
    r.live = a->live;
    r.object.arena = a->handle;
    r.arena = entry;
    limit = a->size;
  } else {
    const tensor_t *t = &p->tensors[entry % TENSORS];
    r.live = t->live;
    r.object.tensor = t->handle;
    r.arena = t->arena;
    start = t->offset;
    limit = t->size;
  }
  if (!r.live) return r;
  r.store = p->arenas[r.arena].store;
  if (!size && !offset) r.size = limit;
  else if (!size || offset > limit || size > limit - offset) r.wrong = INVALID;
  r.whole = !offset && r.size == limit;
  r.at = start + offset;
  return r;
}

uint64_t first_chunk(const range_t *r, uint64_t chunk_bytes) { return r->at / chunk_bytes; }
uint64_t end_chunk(const range_t *r, uint64_t chunk_bytes) {
  return r->size ? (r->at + r->size - 1) / chunk_bytes + 1 : r->at / chunk_bytes;
}

use_t chunk_use(const part_t *p, int store, uint64_t chunk, uint64_t chunk_bytes) {
  use_t use = { .pins = p->arenas[store].pins[chunk % CHUNKS] };
  for (int i = 0; i < HOLDS; i++) {
    const hold_t *h = &p->holds[i];
    if (!h->live || h->store != store || !h->size || h->at / chunk_bytes > chunk ||
        (h->at + h->size - 1) / chunk_bytes < chunk)
      continue;
    bool writes = h->mode & GEMINI_WRITE;
    if (h->tier == GEMINI_TIER_DEVICE) use.device++, use.device_writers += writes;
    else use.host++, use.host_writers += writes;
  }
  return use;
}

use_t range_use(const part_t *p, const range_t *r, uint64_t chunk_bytes) {
  use_t most = { 0 };
  if (!chunk_bytes) return most;
  for (uint64_t i = first_chunk(r, chunk_bytes); i < end_chunk(r, chunk_bytes); i++) {
    use_t use = chunk_use(p, r->store, i, chunk_bytes);
#define MOST(field) most.field = use.field > most.field ? use.field : most.field
    MOST(device), MOST(device_writers), MOST(host), MOST(host_writers), MOST(pins);
#undef MOST
  }
  return most;
}

/* ---- gradients */
int reused_by(const part_t *p, int arena) {
  for (int i = 0; i < ARENAS; i++)
    if (i != arena && p->arenas[i].live && p->arenas[i].store == arena) return i;
  return -1;
}

bool range_touches(const part_t *p, const range_t *r, int tensor) {
  const tensor_t *t = &p->tensors[tensor];
  return t->live && t->arena == r->store && r->size && t->offset < r->at + r->size && r->at < t->offset + t->size;
}

int content_of(const part_t *p, const range_t *r, bool overwritten) {
  bool is_gradient = r->store != r->arena, flips = false;
  if (!is_gradient && reused_by(p, r->arena) < 0) return CONTENT_FINE;
  for (int i = 0; i < TENSORS; i++) {
    const tensor_t *t = &p->tensors[i];
    if (!range_touches(p, r, i) || is_gradient == t->gradient) continue;
    if (!overwritten || t->offset < r->at || t->offset + t->size > r->at + r->size) return CONTENT_WRONG;
    flips = true;
  }
  return flips ? CONTENT_FLIPS : CONTENT_FINE;
}

void content_written(part_t *p, int arena, uint64_t at, uint64_t size) {
  int store = p->arenas[arena].store;
  if (store == arena && reused_by(p, arena) < 0) return;
  for (int i = 0; i < TENSORS; i++) {
    tensor_t *t = &p->tensors[i];
    if (t->live && t->arena == store && t->offset >= at && t->offset + t->size <= at + size)
      t->gradient = store != arena;
  }
}

/* ---- states: docs/states.md */
bool state_legal(uint32_t from, uint32_t to) {
  switch (from) {
  case GEMINI_STATE_FREE: return to == GEMINI_STATE_HOLD;
  case GEMINI_STATE_HOLD: return to == GEMINI_STATE_FREE || to == GEMINI_STATE_READY_FOR_REDUCE;
  case GEMINI_STATE_HOLD_AFTER_FWD: return to == GEMINI_STATE_HOLD;
  case GEMINI_STATE_HOLD_AFTER_BWD: return to == GEMINI_STATE_HOLD || to == GEMINI_STATE_READY_FOR_REDUCE;
  case GEMINI_STATE_READY_FOR_REDUCE: return to == GEMINI_STATE_HOLD;
  default: return false;
  }
}
uint32_t state_after_release(uint32_t phase) {
  if (phase == GEMINI_PHASE_FORWARD) return GEMINI_STATE_HOLD_AFTER_FWD;
  return phase == GEMINI_PHASE_BACKWARD ? GEMINI_STATE_HOLD_AFTER_BWD : GEMINI_STATE_HOLD;
}

/* ---- numbers */
uint32_t dtype_bytes(uint32_t dtype) { return dtype == GEMINI_DTYPE_F64 ? 8 : dtype == GEMINI_DTYPE_F32 ? 4 : 2; }

static double value_of(const uint8_t *bytes, uint32_t dtype) {
  if (dtype == GEMINI_DTYPE_F64) {
    double value;
    memcpy(&value, bytes, sizeof value);
    return value;
  }
  if (dtype == GEMINI_DTYPE_F16) {
    uint32_t half = bytes[0] | (uint32_t)bytes[1] << 8, exponent = half >> 10 & 31, fraction = half & 1023;
    double value = exponent ? ldexp(1024 + fraction, (int)exponent - 25) : ldexp(fraction, -24);
    return half >> 15 ? -value : value;
  }
  uint32_t bits = 0;
  float value;
  if (dtype == GEMINI_DTYPE_F32) memcpy(&bits, bytes, 4);
  else bits = (uint32_t)bytes[0] << 16 | (uint32_t)bytes[1] << 24;
  memcpy(&value, &bits, sizeof value);
  return value;
}

double norm_of(const uint8_t *bytes, uint64_t at, uint64_t size, uint32_t dtype) {
  const uint64_t block = 65536;
  uint32_t width = dtype_bytes(dtype);
  double total = 0;
  for (uint64_t i = 0; i < size;) {
    uint64_t end = block - (at + i) % block;
    if (end > size - i) end = size - i;
    double sum = 0;
    for (uint64_t k = 0; k < end; k += width) {
      double value = value_of(bytes + i + k, dtype);
      sum += value * value;
    }
    total += sum;
    i += end;
  }
  return sqrt(total);
}

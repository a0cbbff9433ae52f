/* Sizes of the public structs in version 1. SPDX-License-Identifier: Apache-2.0
 *
 * Callers of version 1 hand over structs of these sizes for as long as the major version stays: once 0.1 is released,
 * a constant never changes, whatever is appended to its struct. A struct that is new gets its constant here with the
 * call that reads it. */
#ifndef GMI_ABI_H
#define GMI_ABI_H

enum {
  GMI_V1_ERROR_INFO = 520,
  GMI_V1_CONFIG = 152,
  GMI_V1_ARENA_CONFIG = 48,
  GMI_V1_ARENA_INFO = 48,
  GMI_V1_TENSOR_INFO = 176,
  GMI_V1_ACCESS = 48,
  GMI_V1_UPDATE_SPAN = 104,
  GMI_V1_UPDATE = 72,
  GMI_V1_TOPOLOGY_OBJECT = 176,
  GMI_V1_STATS = 152,
  GMI_V1_TIER_STATS = 32,
  GMI_V1_LINK_STATS = 48,
  /* gemini/address.h */
  GMI_V1_LOCATION = 40,
  GMI_V1_FORECAST = 184,
  /* gemini/group.h */
  GMI_V1_GROUP_CONFIG = 48,
  GMI_V1_COMM = 72,
  GMI_V1_GROUP_STATS = 56,
  /* gemini_update.h */
  GMI_V1_ADAMW = 72,
  GMI_V1_SGD = 64,
  GMI_V1_UPDATE_WALK = 552,
  GMI_V1_UPDATE_ARENAS = 72,
  /* The largest size that a struct may ever have. A larger struct_size was never initialised by the caller. */
  GMI_STRUCT_BYTES_MAX = 4096
};

#endif

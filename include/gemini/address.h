/* Device addresses: where one lies, and what is there. SPDX-License-Identifier: Apache-2.0
 *
 * The bytes of an arena keep their device addresses as long as the arena exists, so a program may keep pointers and no
 * handles: gemini_arena_take_pointer() returns one, gemini_address_access() of gemini.h names bytes by one, and the
 * functions here say what is there.
 */
#ifndef GEMINI_ADDRESS_H
#define GEMINI_ADDRESS_H

#include <gemini.h>

#ifdef __cplusplus
extern "C" {
#endif

/** @defgroup address Addresses
 *  @{ */
typedef struct gemini_location {
  uint32_t struct_size;         /* bytes; set by GEMINI_LOCATION_INIT; on return, bytes filled */
  uint32_t reserved;            /* 0 */
  gemini_arena_t arena;         /* of arenas that share their bytes, that of the parameters */
  uint64_t arena_offset_bytes;  /* of the address, from the arena's base */
  gemini_tensor_t tensor;       /* the shortest of those that the address lies in; NULL: none is there */
  uint64_t tensor_offset_bytes; /* of the address, from the tensor's; 0 without a tensor */
} gemini_location_t;
#define GEMINI_LOCATION_INIT { sizeof(gemini_location_t), 0, NULL, 0, NULL, 0 }
/** Says which arena and tensor a device address lies in.
 *  @param address  any value; it is not followed
 *  @param location_out  allocated by the caller, struct_size set; borrowed until return
 *  @retval GEMINI_ERR_NOT_FOUND  the address is not one of the used bytes of an arena: non-model memory
 *           (gemini_alloc()), or no memory of this manager
 *  @retval GEMINI_ERR_INVALID  location_out is NULL, or its struct_size is out of range
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_locate(gemini_manager_t mgr, const void *address, gemini_location_t *location_out)
    GEMINI_MUST_CHECK;
/** Writes in words, for people, what is at an address: which arena, tensors and chunk, where the chunk's bytes are, and
 *  who has acquired the byte; or that it is host memory of a chunk, non-model memory, or no memory of this manager. The
 *  text always ends with a NUL. GEMINI_CONFIG_EXPLAIN_FAULTS says the like about an access that faults.
 *  @param address  any value; it is not followed
 *  @param size_bytes  room in text_out, with the NUL; 0 to ask for the length
 *  @param text_out  receives the text; may be NULL with size_bytes 0
 *  @param length_out  bytes that the text has without the NUL; may be NULL
 *  @retval GEMINI_ERR_INVALID  text_out is NULL and size_bytes is not 0
 *  @retval GEMINI_ERR_OOM_SYSTEM  there is no memory for the text
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_explain_address(gemini_manager_t mgr, const void *address, uint64_t size_bytes,
                                                  char *text_out, uint64_t *length_out) GEMINI_MUST_CHECK;
/** @} */

#ifdef __cplusplus
}
#endif
#endif

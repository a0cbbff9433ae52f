/* Sizes, offsets and values that callers have compiled in, on LP64. A failing line means that a released program
 * would break: append to structs, never change them. abi.c checks that nothing is left out, and the target abi_update
 * writes the entries anew while a version has not been released. SPDX-License-Identifier: Apache-2.0 */
#include <stddef.h>

#include "gemini_update.h"

#ifndef __LP64__
#error "these numbers are of LP64 machines"
#endif

#ifdef __cplusplus
#define ASSERT(condition, text) static_assert(condition, text)
#else
#define ASSERT(condition, text) _Static_assert(condition, text)
#endif
#define SIZE(type, bytes) ASSERT(sizeof(type) == (bytes), "size of " #type)
#define OFFSET(type, field, bytes) ASSERT(offsetof(type, field) == (bytes), "offset of " #field " in " #type)
#define VALUE(name, value) ASSERT((name) == (value), "value of " #name)

/* --- entries --- */

SIZE(gemini_adamw_t, 96);
OFFSET(gemini_adamw_t, struct_size, 0);
OFFSET(gemini_adamw_t, flags, 4);
OFFSET(gemini_adamw_t, param_dtype, 8);
OFFSET(gemini_adamw_t, grad_dtype, 12);
OFFSET(gemini_adamw_t, step, 16);
OFFSET(gemini_adamw_t, lr, 24);
OFFSET(gemini_adamw_t, beta1, 32);
OFFSET(gemini_adamw_t, beta2, 40);
OFFSET(gemini_adamw_t, eps, 48);
OFFSET(gemini_adamw_t, weight_decay, 56);
OFFSET(gemini_adamw_t, grad_scale, 64);
OFFSET(gemini_adamw_t, momentum_dtype, 72);
OFFSET(gemini_adamw_t, variance_dtype, 76);
OFFSET(gemini_adamw_t, seed, 80);
OFFSET(gemini_adamw_t, first_element, 88);

SIZE(gemini_sgd_t, 64);
OFFSET(gemini_sgd_t, struct_size, 0);
OFFSET(gemini_sgd_t, flags, 4);
OFFSET(gemini_sgd_t, param_dtype, 8);
OFFSET(gemini_sgd_t, grad_dtype, 12);
OFFSET(gemini_sgd_t, step, 16);
OFFSET(gemini_sgd_t, lr, 24);
OFFSET(gemini_sgd_t, momentum, 32);
OFFSET(gemini_sgd_t, dampening, 40);
OFFSET(gemini_sgd_t, weight_decay, 48);
OFFSET(gemini_sgd_t, grad_scale, 56);

SIZE(gemini_update_arenas_t, 72);
OFFSET(gemini_update_arenas_t, struct_size, 0);
OFFSET(gemini_update_arenas_t, flags, 4);
OFFSET(gemini_update_arenas_t, param, 8);
OFFSET(gemini_update_arenas_t, grad, 16);
OFFSET(gemini_update_arenas_t, master, 24);
OFFSET(gemini_update_arenas_t, momentum, 32);
OFFSET(gemini_update_arenas_t, variance, 40);
OFFSET(gemini_update_arenas_t, first_element, 48);
OFFSET(gemini_update_arenas_t, element_count, 56);
OFFSET(gemini_update_arenas_t, stream, 64);

SIZE(gemini_update_range_t, 16);
OFFSET(gemini_update_range_t, end_element, 0);
OFFSET(gemini_update_range_t, rule, 8);

SIZE(gemini_update_walk_t, 552);
OFFSET(gemini_update_walk_t, struct_size, 0);
OFFSET(gemini_update_walk_t, flags, 4);
OFFSET(gemini_update_walk_t, adamws, 8);
OFFSET(gemini_update_walk_t, sgds, 16);
OFFSET(gemini_update_walk_t, rule_count, 24);
OFFSET(gemini_update_walk_t, ranges, 32);
OFFSET(gemini_update_walk_t, range_count, 40);
OFFSET(gemini_update_walk_t, param_index, 48);
OFFSET(gemini_update_walk_t, grad_index, 52);
OFFSET(gemini_update_walk_t, master_index, 56);
OFFSET(gemini_update_walk_t, momentum_index, 60);
OFFSET(gemini_update_walk_t, variance_index, 64);
OFFSET(gemini_update_walk_t, failing, 68);
OFFSET(gemini_update_walk_t, mgr, 72);
OFFSET(gemini_update_walk_t, stream_native, 80);
OFFSET(gemini_update_walk_t, stream_call, 88);
OFFSET(gemini_update_walk_t, status, 96);
OFFSET(gemini_update_walk_t, reserved, 100);
OFFSET(gemini_update_walk_t, native_code, 104);
OFFSET(gemini_update_walk_t, message, 112);

VALUE(GEMINI_ADAMW_L2, 1);
VALUE(GEMINI_ADAMW_SPLIT, 2);
VALUE(GEMINI_SGD_NESTEROV, 1);

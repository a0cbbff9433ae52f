/* Fused updates: argument checks, coefficients, the choice of an instruction set, and updates on the host.
 * SPDX-License-Identifier: Apache-2.0
 *
 * An update runs to its end on the calling thread. The only shared state is the chosen instruction set; all of them
 * give bit-equal results, so the choice affects speed only. */
#include "update/update.h"
#include "update/beside.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#ifdef __x86_64__
#include <cpuid.h>
#endif

#include "base/abi.h"

#define COUNT_MAX (UINT64_C(1) << 40)

/* --- errors --- */

gemini_status_t gmi_update_fail(const char *operation, gemini_status_t status, int64_t native_code, const char *format,
                                ...) {
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  va_list args;
  info.status = status;
  info.native_code = native_code;
  snprintf(info.operation, sizeof info.operation, "%s", operation);
  va_start(args, format);
  vsnprintf(info.message, sizeof info.message, format, args);
  va_end(args);
  (void)gemini_error_set(&info);
  return status;
}

gemini_status_t gmi_update_fail_in(const char *operation, const char *format, ...) {
  gemini_error_info_t within = GEMINI_ERROR_INFO_INIT;
  char where[sizeof within.message];
  va_list args;
  (void)gemini_last_error(&within);
  va_start(args, format);
  vsnprintf(where, sizeof where, format, args);
  va_end(args);
  return gmi_update_fail(operation, within.status, within.native_code, "%s: %s", where, within.message);
}

/* --- checks and coefficients --- */

gemini_status_t gmi_update_struct(const char *operation, const char *name, const void *theirs, size_t v1_size,
                                  void *ours, size_t our_size) {
  uint32_t size;
  if (!theirs) return gmi_update_fail(operation, GEMINI_ERR_INVALID, 0, "%s is NULL", name);
  memcpy(&size, theirs, sizeof size);
  if (size < v1_size || size > GMI_STRUCT_BYTES_MAX)
    return gmi_update_fail(operation, GEMINI_ERR_INVALID, 0, "%s: struct_size is %" PRIu32 ", want %zu to %d", name,
                           size, v1_size, GMI_STRUCT_BYTES_MAX);
  for (size_t i = our_size; i < size; i++) {
    if (((const unsigned char *)theirs)[i])
      return gmi_update_fail(operation, GEMINI_ERR_INVALID, 0,
                             "%s: byte %zu of %" PRIu32 " is not 0, but this library (%s) knows the first %zu only",
                             name, i, size, GEMINI_VERSION_STRING, our_size);
  }
  if (!ours) return GEMINI_OK;
  memset(ours, 0, our_size);
  memcpy(ours, theirs, size < our_size ? size : our_size);
  return GEMINI_OK;
}

typedef struct array {
  const char *name;
  uint64_t base, width;
} array_t;

/* Checks that the first `used` arrays are set (param may be NULL), aligned to their elements, and do not overlap. The
 * gradient may be the parameter's own array if the elements have one size, as each element is read before it is
 * written; but not where the parameter is half of the master. */
static gemini_status_t check_arrays(const char *operation, uint32_t param_dtype, uint32_t grad_dtype,
                                    const gmi_widths_t *widths, uint64_t count, const gmi_arrays_t *a, size_t used) {
  const bool split = widths->master == 2;
  const array_t arrays[] = {
    { "param", (uintptr_t)a->param, gmi_dtype_bytes(param_dtype) },
    { "grad", (uintptr_t)a->grad, gmi_dtype_bytes(grad_dtype) },
    { "master", (uintptr_t)a->master, widths->master },
    { "momentum", (uintptr_t)a->momentum, widths->momentum },
    { "variance", (uintptr_t)a->variance, widths->variance },
  };
  for (size_t i = 0; i < used; i++) {
    const array_t *x = &arrays[i];
    if (i == 0 && !x->base) continue;
    if (!x->base) return gmi_update_fail(operation, GEMINI_ERR_INVALID, 0, "%s is NULL", x->name);
    if (x->base % x->width)
      return gmi_update_fail(operation, GEMINI_ERR_INVALID, 0,
                             "%s is %#" PRIx64 ", which is no multiple of its element's %" PRIu64 " bytes", x->name,
                             x->base, x->width);
    for (size_t k = i + 1; k < used; k++) {
      const array_t *y = &arrays[k];
      if (i == 0 && k == 1 && x->base == y->base && x->width == y->width && !split) continue;
      if (x->base < y->base + count * y->width && y->base < x->base + count * x->width)
        return gmi_update_fail(operation, GEMINI_ERR_INVALID, 0,
                               "%s at %#" PRIx64 " and %s at %#" PRIx64 " overlap over %" PRIu64 " elements", x->name,
                               x->base, y->name, y->base, count);
    }
  }
  return GEMINI_OK;
}

static bool is_low_or_f32(uint32_t dtype) {
  return dtype == GEMINI_DTYPE_F32 || dtype == GEMINI_DTYPE_BF16 || dtype == GEMINI_DTYPE_F16;
}

/* Rounds a coefficient to fp32. *failed_out becomes the name of the first one that is not finite then. */
static float rounded(double value, const char *name, const char **failed_out) {
  float result = (float)value;
  if (!isfinite(result) && !*failed_out) *failed_out = name;
  return result;
}

#define REFUSE(...) return gmi_update_fail(operation, GEMINI_ERR_INVALID, 0, __VA_ARGS__)

/* Checks the fields that all updates have. */
static gemini_status_t check_shared(const char *operation, uint32_t unknown_flags, uint32_t param_dtype,
                                    uint32_t grad_dtype, uint64_t step, uint64_t count, const gmi_arrays_t *a) {
  if (unknown_flags) REFUSE("flags has unknown bits: %#" PRIx32, unknown_flags);
  if (!is_low_or_f32(grad_dtype)) REFUSE("grad_dtype is %" PRIu32 ", want F32, BF16 or F16", grad_dtype);
  if (a->param && !is_low_or_f32(param_dtype)) REFUSE("param_dtype is %" PRIu32 ", want F32, BF16 or F16", param_dtype);
  if (!step) REFUSE("step is 0, want at least 1");
  if (count > COUNT_MAX) REFUSE("count is %" PRIu64 ", want at most %" PRIu64, count, COUNT_MAX);
  return GEMINI_OK;
}

gmi_widths_t gmi_adamw_widths(const gemini_adamw_t *theirs) {
  gemini_adamw_t adamw = { 0 };
  memcpy(&adamw, theirs, theirs->struct_size < sizeof adamw ? theirs->struct_size : sizeof adamw);
  return (gmi_widths_t){ adamw.flags & GEMINI_ADAMW_SPLIT ? 2 : 4, (uint32_t)gmi_dtype_bytes(adamw.momentum_dtype),
                         (uint32_t)gmi_dtype_bytes(adamw.variance_dtype) };
}

static bool is_state_dtype(uint32_t dtype) {
  return dtype == GEMINI_DTYPE_F32 || dtype == GEMINI_DTYPE_BF16 || dtype == GEMINI_DTYPE_BLOCK8;
}

/* Checks what says which types the states have. */
static gemini_status_t check_states(const char *operation, const gemini_adamw_t *adamw, uint64_t first, uint64_t count,
                                    const gmi_arrays_t *a) {
  if (!is_state_dtype(adamw->momentum_dtype))
    REFUSE("momentum_dtype is %" PRIu32 ", want F32, BF16 or BLOCK8", adamw->momentum_dtype);
  if (!is_state_dtype(adamw->variance_dtype))
    REFUSE("variance_dtype is %" PRIu32 ", want F32, BF16 or BLOCK8", adamw->variance_dtype);
  const bool blocks = adamw->momentum_dtype == GEMINI_DTYPE_BLOCK8 || adamw->variance_dtype == GEMINI_DTYPE_BLOCK8;
  if (blocks && ((adamw->first_element + first) % GMI_BLOCK || count % GMI_BLOCK))
    REFUSE("elements %" PRIu64 " to %" PRIu64 " are not whole blocks of %u, which 8-bit states have",
           adamw->first_element + first, adamw->first_element + first + count, GMI_BLOCK);
  if (!(adamw->flags & GEMINI_ADAMW_SPLIT)) return GEMINI_OK;
  if (!a->param) REFUSE("there is no param, which is half of each master with GEMINI_ADAMW_SPLIT");
  if (adamw->param_dtype != GEMINI_DTYPE_BF16)
    REFUSE("param_dtype is %" PRIu32 ", GEMINI_ADAMW_SPLIT wants BF16", adamw->param_dtype);
  return GEMINI_OK;
}

/* The finalizer of splitmix64: keys of seeds and steps that are alike are not. */
static uint64_t mixed(uint64_t x) {
  x += UINT64_C(0x9e3779b97f4a7c15);
  x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
  return x ^ x >> 31;
}

gemini_status_t gmi_adamw_prepare(const char *operation, const gemini_adamw_t *theirs, uint64_t first, uint64_t count,
                                  const gmi_arrays_t *a, gmi_adamw_t *k_out) {
  gemini_adamw_t adamw;
  gemini_status_t status = gmi_update_struct(operation, "adamw", theirs, GMI_V1_ADAMW, &adamw, sizeof adamw);
  if (status) return status;
  status = check_shared(operation, adamw.flags & ~(uint32_t)(GEMINI_ADAMW_L2 | GEMINI_ADAMW_SPLIT), adamw.param_dtype,
                        adamw.grad_dtype, adamw.step, count, a);
  if (!status) status = check_states(operation, &adamw, first, count, a);
  if (status) return status;
  /* Negated comparisons, so that NaN is refused, too. */
  if (!(adamw.lr >= 0)) REFUSE("lr is %g, want at least 0", adamw.lr);
  if (!(adamw.beta1 >= 0 && adamw.beta1 < 1)) REFUSE("beta1 is %.17g, want 0 <= beta1 < 1", adamw.beta1);
  if (!(adamw.beta2 >= 0 && adamw.beta2 < 1)) REFUSE("beta2 is %.17g, want 0 <= beta2 < 1", adamw.beta2);
  if (!(adamw.eps >= 0)) REFUSE("eps is %g, want at least 0", adamw.eps);
  /* The padding of a block's last elements would become 0 / 0, and spread over the block by its scale. */
  if (adamw.eps == 0 && (adamw.momentum_dtype == GEMINI_DTYPE_BLOCK8 || adamw.variance_dtype == GEMINI_DTYPE_BLOCK8))
    REFUSE("eps is %g, want more than 0 where moments are in blocks of 8-bit codes", adamw.eps);
  if (!(adamw.weight_decay >= 0)) REFUSE("weight_decay is %g, want at least 0", adamw.weight_decay);
  const gmi_widths_t widths = gmi_adamw_widths(&adamw);
  status = count ? check_arrays(operation, adamw.param_dtype, adamw.grad_dtype, &widths, count, a, 5) : GEMINI_OK;
  if (status) return status;
  /* 1 - beta^step = -expm1(step * log(beta)). The plain subtraction would lose digits when beta^step is near 1. With
   * beta 0 the logarithm is -infinity and the result 1, as it should be. */
  const double correction1 = -expm1((double)adamw.step * log(adamw.beta1));
  const double correction2 = -expm1((double)adamw.step * log(adamw.beta2));
  const bool l2 = adamw.flags & GEMINI_ADAMW_L2;
  const uint64_t key = mixed(mixed(adamw.seed) ^ adamw.step);
  const char *failed = NULL;
  *k_out = (gmi_adamw_t){
    .grad_scale = rounded(adamw.grad_scale, "grad_scale", &failed),
    .l2 = rounded(l2 ? adamw.weight_decay : 0, "weight_decay", &failed),
    .beta1 = (float)adamw.beta1,
    .one_minus_beta1 = (float)(1 - adamw.beta1),
    .beta2 = (float)adamw.beta2,
    .one_minus_beta2 = (float)(1 - adamw.beta2),
    .root_scale = (float)(1 / sqrt(correction2)),
    .eps = rounded(adamw.eps, "eps", &failed),
    .step_size = rounded(adamw.lr / correction1, "lr / (1 - beta1^step)", &failed),
    .decay = rounded(l2 ? 0 : adamw.lr * adamw.weight_decay, "lr * weight_decay", &failed),
    .param_dtype = a->param ? adamw.param_dtype : GMI_DTYPE_NONE,
    .grad_dtype = adamw.grad_dtype,
    .momentum_dtype = adamw.momentum_dtype,
    .variance_dtype = adamw.variance_dtype,
    .split = (adamw.flags & GEMINI_ADAMW_SPLIT) != 0,
    .keys = { (uint32_t)key, (uint32_t)(key >> 32) },
    .first = (uint32_t)(adamw.first_element + first),
  };
  if (failed) REFUSE("%s is not finite in fp32", failed);
  return GEMINI_OK;
}

gemini_status_t gmi_sgd_prepare(const char *operation, const gemini_sgd_t *theirs, uint64_t count,
                                const gmi_arrays_t *a, gmi_sgd_t *k_out) {
  gemini_sgd_t sgd;
  gemini_status_t status = gmi_update_struct(operation, "sgd", theirs, GMI_V1_SGD, &sgd, sizeof sgd);
  if (status) return status;
  status = check_shared(operation, sgd.flags & ~(uint32_t)GEMINI_SGD_NESTEROV, sgd.param_dtype, sgd.grad_dtype,
                        sgd.step, count, a);
  if (status) return status;
  const bool nesterov = sgd.flags & GEMINI_SGD_NESTEROV;
  if (!(sgd.lr >= 0)) REFUSE("lr is %g, want at least 0", sgd.lr);
  if (!(sgd.momentum >= 0)) REFUSE("momentum is %g, want at least 0", sgd.momentum);
  if (!(sgd.weight_decay >= 0)) REFUSE("weight_decay is %g, want at least 0", sgd.weight_decay);
  if (nesterov && sgd.momentum == 0) REFUSE("momentum is 0, GEMINI_SGD_NESTEROV wants more than 0");
  if (nesterov && sgd.dampening != 0) REFUSE("dampening is %g, GEMINI_SGD_NESTEROV wants 0", sgd.dampening);
  const char *failed = NULL;
  *k_out = (gmi_sgd_t){
    .grad_scale = rounded(sgd.grad_scale, "grad_scale", &failed),
    .l2 = rounded(sgd.weight_decay, "weight_decay", &failed),
    .momentum = rounded(sgd.momentum, "momentum", &failed),
    .one_minus_dampening = rounded(1 - sgd.dampening, "1 - dampening", &failed),
    .lr = rounded(sgd.lr, "lr", &failed),
    .flags = (sgd.momentum != 0 ? GMI_SGD_MOMENTUM : 0) | (sgd.step == 1 ? GMI_SGD_BEGINS : 0) |
             (nesterov ? GMI_SGD_NESTEROV : 0),
    .param_dtype = a->param ? sgd.param_dtype : GMI_DTYPE_NONE,
    .grad_dtype = sgd.grad_dtype,
  };
  if (failed) REFUSE("%s is not finite in fp32", failed);
  const gmi_widths_t widths = { 4, 4, 4 };
  return count ? check_arrays(operation, sgd.param_dtype, sgd.grad_dtype, &widths, count, a, sgd.momentum != 0 ? 4 : 3)
               : GEMINI_OK;
}

/* --- instructions --- */

enum { ADAMW, SGD, NARROW, BLOCKS, UPDATES };
typedef struct isa {
  const char *name;
  gmi_kernel_fn *kernels[UPDATES];
  gmi_beside_fn *adamw_beside, *adamw_results; /* or NULL */
} isa_t;
/* From the slowest to the fastest. [0] runs everywhere, and does the last elements of a span for the others. */
static const isa_t isas[] = {
  { "plain", { gmi_adamw_plain, gmi_sgd_plain, gmi_narrow_plain, gmi_blocks_plain }, NULL, NULL },
#ifdef __x86_64__
  { "avx2",
    { gmi_adamw_avx2, gmi_sgd_avx2, gmi_narrow_avx2, gmi_blocks_avx2 },
    gmi_adamw_beside_avx2,
    gmi_adamw_results_avx2 },
  { "avx512",
    { gmi_adamw_avx512, gmi_sgd_avx512, gmi_narrow_avx512, gmi_blocks_avx512 },
    gmi_adamw_beside_avx512,
    gmi_adamw_results_avx512 },
#endif
};
#define ISAS (sizeof isas / sizeof *isas)

static bool machine_has(size_t i) {
  if (i == 0) return true;
#ifdef __x86_64__
  __builtin_cpu_init();
  if (i == 1) { /* F16C is looked up in CPUID, as __builtin_cpu_supports() of clang before 18 does not know it */
    unsigned eax, ebx, ecx = 0, edx;
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
  }
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

/* Atomic: NULL: not chosen yet. Relaxed: it points to constant data, and threads that choose at the same time choose
 * the same. */
static const isa_t *_Atomic chosen;

static const isa_t *isa(void) {
  const isa_t *result = atomic_load_explicit(&chosen, memory_order_relaxed);
  if (result) return result;
  size_t i = ISAS - 1;
  while (!machine_has(i)) i--;
  atomic_store_explicit(&chosen, &isas[i], memory_order_relaxed);
  return &isas[i];
}

const char *gemini_update_isa(void) { return isa()->name; }

gemini_status_t gemini_update_force_isa(const char *name) {
  if (!name) {
    atomic_store(&chosen, NULL);
    return GEMINI_OK;
  }
  for (size_t i = 0; i < ISAS; i++) {
    if (strcmp(name, isas[i].name) != 0) continue;
    if (!machine_has(i)) return gmi_update_fail(__func__, GEMINI_ERR_UNSUPPORTED, 0, "this machine has no %s", name);
    atomic_store(&chosen, &isas[i]);
    return GEMINI_OK;
  }
  return gmi_update_fail(__func__, GEMINI_ERR_INVALID, 0, "name is '%s', want plain, avx2 or avx512", name);
}

/* --- the update on the host --- */

static double sum_of(const double *lanes, uint64_t count) {
  double sum = lanes[0];
  for (uint64_t i = 1; i < count; i++) sum += lanes[i];
  return sum;
}

/* Updates count elements tile by tile, with the plain kernel for the rest of the last tile that is no multiple of
 * GMI_LANES. sum_out: receives the sum of the gradient's squares; may be NULL. */
static void run(int update, const void *k, const gmi_arrays_t *a, uint64_t count, double *sum_out) {
  gmi_kernel_fn *kernel = isa()->kernels[update], *rest = isas[0].kernels[update];
  double tiles[GMI_TILE_LANES] = { 0 };
  for (uint64_t first = 0; first < count; first += GMI_TILE) {
    double lanes[GMI_LANES] = { 0 };
    uint64_t here = count - first < GMI_TILE ? count - first : GMI_TILE, whole = here - here % GMI_LANES;
    kernel(k, a, first, whole, lanes);
    if (whole < here) rest(k, a, first + whole, here - whole, lanes);
    tiles[first / GMI_TILE % GMI_TILE_LANES] += sum_of(lanes, GMI_LANES);
  }
  /* Only the tile lanes that tiles were added to; the others are 0 and would not change the sum. */
  const uint64_t used = gemini_update_sums(count) - 1;
  if (sum_out) *sum_out = sum_of(tiles, used < 1 ? 1 : used < GMI_TILE_LANES ? used : GMI_TILE_LANES);
}

static int kernel_of(const gmi_adamw_t *k) { return gmi_has_blocks(k) ? BLOCKS : gmi_is_narrow(k) ? NARROW : ADAMW; }

gemini_status_t gmi_adamw_host(const char *operation, const gemini_adamw_t *adamw, uint64_t first, uint64_t count,
                               const gmi_arrays_t *a, double *grad_sum_squares_out) {
  gmi_adamw_t k;
  gemini_status_t status = gmi_adamw_prepare(operation, adamw, first, count, a, &k);
  if (!status) run(kernel_of(&k), &k, a, count, grad_sum_squares_out);
  return status;
}

gemini_status_t gemini_adamw_host(const gemini_adamw_t *adamw, uint64_t count, void *param, const void *grad,
                                  void *master, void *momentum, void *variance, double *grad_sum_squares_out) {
  const gmi_arrays_t a = { param, grad, master, momentum, variance };
  return gmi_adamw_host(__func__, adamw, 0, count, &a, grad_sum_squares_out);
}

gemini_status_t gemini_sgd_host(const gemini_sgd_t *sgd, uint64_t count, void *param, const void *grad, float *master,
                                float *momentum, double *grad_sum_squares_out) {
  const gmi_arrays_t a = { param, grad, master, momentum, NULL };
  gmi_sgd_t k;
  gemini_status_t status = gmi_sgd_prepare(__func__, sgd, count, &a, &k);
  if (!status) run(SGD, &k, &a, count, grad_sum_squares_out);
  return status;
}

/* --- the update beside the old values --- */

static void copy_tile(void *to, const void *from, uint64_t first, uint64_t count, uint64_t bytes) {
  if (from) memcpy((char *)to + first * bytes, (const char *)from + first * bytes, count * bytes);
}

/* One tile at a time: copies the old values, and updates the copies in place while they are in the cache. */
static void run_copied(int update, const void *k, const gmi_widths_t *widths, const gmi_arrays_t *a,
                       const gmi_arrays_t *to, uint64_t first, uint64_t count) {
  gmi_kernel_fn *kernel = isa()->kernels[update], *rest = isas[0].kernels[update];
  const gmi_arrays_t in_place = { to->param, a->grad, to->master, to->momentum, to->variance };
  for (const uint64_t end = first + count; first < end; first += GMI_TILE) {
    double lanes[GMI_LANES] = { 0 };
    const uint64_t here = end - first < GMI_TILE ? end - first : GMI_TILE, whole = here - here % GMI_LANES;
    if (widths->master == 2) copy_tile(to->param, a->param, first, here, 2);
    copy_tile(to->master, a->master, first, here, widths->master);
    copy_tile(to->momentum, a->momentum, first, here, widths->momentum);
    copy_tile(to->variance, a->variance, first, here, widths->variance);
    kernel(k, &in_place, first, whole, lanes);
    if (whole < here) rest(k, &in_place, first + whole, here - whole, lanes);
  }
}

static bool may_stream(const gmi_adamw_t *k, const gmi_arrays_t *to) {
  const uintptr_t all = (uintptr_t)to->master | (uintptr_t)to->momentum | (uintptr_t)to->variance;
  return all % 64 == 0 && (uintptr_t)to->param % (k->param_dtype == GEMINI_DTYPE_F32 ? 64 : 32) == 0;
}

gemini_status_t gmi_adamw_beside(const char *operation, const gemini_adamw_t *adamw, uint64_t first, uint64_t count,
                                 const gmi_arrays_t *a, const gmi_arrays_t *to) {
  gmi_adamw_t k;
  gmi_arrays_t read = { to->param, a->grad, a->master, a->momentum, a->variance };
  const gmi_arrays_t written = { to->param, a->grad, to->master, to->momentum, to->variance };
  gemini_status_t status = gmi_adamw_prepare(operation, adamw, first, count, &written, &k);
  if (!status && k.split) read.param = a->param; /* as it is read, too */
  if (!status) status = gmi_adamw_prepare(operation, adamw, first, count, &read, &k);
  if (status) return status;
  const gmi_widths_t widths = gmi_adamw_widths(adamw);
  if (gmi_is_narrow(&k)) { /* these values are small enough to be written through the caches */
    run_copied(kernel_of(&k), &k, &widths, &read, to, 0, count);
    return GEMINI_OK;
  }
  const uint64_t whole = isa()->adamw_beside && may_stream(&k, to) ? count - count % GMI_LANES : 0;
  if (whole) isa()->adamw_beside(&k, &read, to, 0, whole);
  run_copied(ADAMW, &k, &widths, &read, to, whole, count - whole);
  return GEMINI_OK;
}

gemini_status_t gmi_sgd_beside(const char *operation, const gemini_sgd_t *sgd, uint64_t count, const gmi_arrays_t *a,
                               const gmi_arrays_t *to) {
  gmi_sgd_t k;
  const gmi_arrays_t read = { to->param, a->grad, a->master, a->momentum, NULL };
  const gmi_arrays_t written = { to->param, a->grad, to->master, to->momentum, NULL };
  gemini_status_t status = gmi_sgd_prepare(operation, sgd, count, &read, &k);
  if (!status) status = gmi_sgd_prepare(operation, sgd, count, &written, &k);
  const gmi_widths_t widths = { 4, 4, 4 };
  if (!status) run_copied(SGD, &k, &widths, &read, to, 0, count);
  return status;
}

/* --- the parameters alone --- */

/* Copies the elements from first on to the begin of to. */
static void copy_part(void *to, const void *from, uint64_t first, uint64_t count, uint64_t bytes) {
  if (from) memcpy(to, (const char *)from + first * bytes, count * bytes);
}

/* As run_copied(), but the copies are dropped: only what is written beside them, the parameters, stays. Random bits, which
 * go by an element's number, are for states alone. */
static void run_results(int update, const void *k, const gmi_widths_t *widths, const gmi_arrays_t *a, uint64_t first,
                        uint64_t count, uint32_t param_dtype, uint32_t grad_dtype) {
  _Alignas(64) float master[GMI_TILE], momentum[GMI_TILE], variance[GMI_TILE];
  gmi_kernel_fn *kernel = isa()->kernels[update], *rest = isas[0].kernels[update];
  for (const uint64_t end = first + count; first < end; first += GMI_TILE) {
    double lanes[GMI_LANES] = { 0 };
    const uint64_t here = end - first < GMI_TILE ? end - first : GMI_TILE, whole = here - here % GMI_LANES;
    const gmi_arrays_t tile = { (char *)a->param + first * gmi_dtype_bytes(param_dtype),
                                (char *)a->grad + first * gmi_dtype_bytes(grad_dtype), master, momentum, variance };
    copy_part(master, a->master, first, here, widths->master);
    copy_part(momentum, a->momentum, first, here, widths->momentum);
    copy_part(variance, a->variance, first, here, widths->variance);
    kernel(k, &tile, 0, whole, lanes);
    if (whole < here) rest(k, &tile, whole, here - whole, lanes);
  }
}

gemini_status_t gmi_adamw_results(const char *operation, const gemini_adamw_t *adamw, uint64_t first, uint64_t count,
                                  const gmi_arrays_t *a) {
  gmi_adamw_t k;
  gemini_status_t status = gmi_adamw_prepare(operation, adamw, first, count, a, &k);
  if (!status && (k.split || !a->param))
    return gmi_update_fail(operation, GEMINI_ERR_INVALID, 0,
                           "there are no parameters that can be written without their masters");
  if (status) return status;
  const gmi_widths_t widths = gmi_adamw_widths(adamw);
  const bool streams = isa()->adamw_results && !gmi_is_narrow(&k) &&
                       (uintptr_t)a->param % (k.param_dtype == GEMINI_DTYPE_F32 ? 64 : 32) == 0;
  const uint64_t whole = streams ? count - count % GMI_LANES : 0;
  if (whole) isa()->adamw_results(&k, a, a, 0, whole);
  run_results(kernel_of(&k), &k, &widths, a, whole, count - whole, k.param_dtype, k.grad_dtype);
  return GEMINI_OK;
}

gemini_status_t gmi_sgd_results(const char *operation, const gemini_sgd_t *sgd, uint64_t count, const gmi_arrays_t *a) {
  gmi_sgd_t k;
  gemini_status_t status = gmi_sgd_prepare(operation, sgd, count, a, &k);
  if (!status && !a->param) return gmi_update_fail(operation, GEMINI_ERR_INVALID, 0, "there are no parameters");
  const gmi_widths_t widths = { 4, 4, 4 };
  if (!status) run_results(SGD, &k, &widths, a, 0, count, k.param_dtype, k.grad_dtype);
  return status;
}

/* Compares the fused AdamW of bindings/update on a GPU with copies of the driver that move the same number of bytes;
 * both alternate. SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "cli.h"
#include "device/cuda_driver.h"
#include "gemini_update.h"
#include "row.h"

#define PROGRAM "bench_update_gpu"
#define MIB (UINT64_C(1) << 20)
enum { PASSES_MAX = 101, PARAM_BYTES = 14 }; /* bytes read per parameter, and as many written */
enum { UPDATE, UPDATE_WITH_NORM, COPY, KINDS };

static const gmi_cuda_driver_t *driver;
static cu_stream_t stream;
static uint64_t elements = UINT64_C(256) * MIB, passes = 15, ordinal;

static int fail(const char *what, cu_result_t result) {
  cli_error(PROGRAM, "%s: %s", what, driver ? gmi_cuda_error_name(driver, result) : "no CUDA driver");
  return CLI_EXIT_FAILURE;
}
#define TRY(call)                                                 \
  do {                                                            \
    cu_result_t try_result = (call);                              \
    if (try_result != CU_SUCCESS) return fail(#call, try_result); \
  } while (0)

/* Allocates GPU memory and fills it with a byte. It is freed when the process ends. */
static int memory_open(uint64_t bytes, unsigned char byte, cu_address_t *address_out) {
  const cu_allocation_t what = { .type = CU_ALLOCATION_PINNED, .location = { CU_LOCATION_DEVICE, (int)ordinal } };
  const cu_access_t access = { what.location, CU_ACCESS_READ_WRITE };
  cu_memory_t memory;
  bytes = (bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
  TRY(driver->address_reserve(address_out, bytes, 0, 0, 0));
  TRY(driver->memory_create(&memory, bytes, &what, 0));
  TRY(driver->memory_map(*address_out, bytes, 0, memory, 0));
  TRY(driver->memory_access(*address_out, bytes, &access, 1));
  TRY(driver->set_bytes(*address_out, byte, bytes, stream));
  return CLI_EXIT_OK;
}

int main(int argc, char **argv) {
  const cli_option_t options[] = {
    { "elements", CLI_U64, &elements, "parameters", 1024, UINT64_C(1) << 36, NULL },
    { "passes", CLI_U64, &passes, "passes of each kind, of which the median counts", 1, PASSES_MAX, NULL },
    { "gpu", CLI_U64, &ordinal, "which GPU", 0, 1000, NULL },
    { NULL, 0, NULL, NULL, 0, 0, NULL },
  };
  int status = cli_parse(PROGRAM, "fused AdamW on a GPU against a copy of as many bytes", options, argc, argv);
  if (status >= 0) return status;
  cu_context_t context;
  cu_event_t begin, end;
  driver = gmi_cuda_driver();
  if (!driver) return fail("the GPU cannot be opened", CU_NO_DEVICE);
  TRY(driver->init(0));
  TRY(driver->primary_retain(&context, (cu_device_t)ordinal));
  TRY(driver->current_set(context));
  TRY(driver->stream_create(&stream, CU_STREAM_NON_BLOCKING_FLAG));
  TRY(driver->event_create(&begin, 0));
  TRY(driver->event_create(&end, 0));
  /* bf16 gradients of 0.011, which share their bytes with the parameters; a variance of 4e-5. */
  enum { GRAD, MASTER, MOMENTUM, VARIANCE, SUMS, FROM, TO, ARRAYS };
  static const uint64_t widths[ARRAYS] = { 2, 4, 4, 4, 0, PARAM_BYTES, PARAM_BYTES };
  cu_address_t at[ARRAYS];
  for (int i = 0; i < ARRAYS; i++) {
    uint64_t bytes = i == SUMS ? gemini_update_sums(elements) * sizeof(double) : elements * widths[i];
    status = memory_open(bytes, i == VARIANCE ? 0x38 : 0x3c, &at[i]);
    if (status) return status;
  }
  gemini_adamw_t adamw = GEMINI_ADAMW_INIT;
  double seconds[KINDS][PASSES_MAX];
  for (uint64_t pass = 0; pass <= passes; pass++) { /* the first pass warms up */
    for (int kind = 0; kind < KINDS; kind++) {
      float ms;
      cu_result_t result;
      TRY(driver->event_record(begin, stream));
      if (kind == COPY) {
        TRY(driver->copy_d2d(at[TO], at[FROM], elements * PARAM_BYTES, stream));
      } else if (gemini_adamw_cuda(&adamw, elements, (void *)at[GRAD], (void *)at[GRAD], (float *)at[MASTER],
                                   (float *)at[MOMENTUM], (float *)at[VARIANCE], stream,
                                   kind == UPDATE ? NULL : (double *)at[SUMS])) {
        gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
        (void)gemini_last_error(&info);
        cli_error(PROGRAM, "%s: %s", info.operation, info.message);
        return CLI_EXIT_FAILURE;
      }
      TRY(driver->event_record(end, stream));
      while ((result = driver->event_query(end)) == CU_NOT_READY) {
      }
      TRY(result);
      TRY(driver->event_elapsed(&ms, begin, end));
      if (pass) seconds[kind][pass - 1] = (double)ms * 1e-3;
      adamw.step++;
    }
  }
  for (int kind = 0; kind < KINDS; kind++) cli_sort(seconds[kind], passes);
  const double median[KINDS] = { seconds[UPDATE][passes / 2], seconds[UPDATE_WITH_NORM][passes / 2],
                                 seconds[COPY][passes / 2] };
  row_t row;
  row_begin(&row, PROGRAM, "bf16");
  row_value(&row, median[UPDATE] / (double)elements, "s/parameter");
  row_ratio(&row, median[COPY] / median[UPDATE], "the driver's copy on the GPU of as many bytes");
  row_f64(&row, "with_norm_s_per_parameter", median[UPDATE_WITH_NORM] / (double)elements);
  row_f64(&row, "copy_s_per_parameter", median[COPY] / (double)elements);
  row_f64(&row, "bytes_per_s", 2.0 * PARAM_BYTES * (double)elements / median[UPDATE]);
  row_u64(&row, "parameters", elements);
  return row_end(&row) ? CLI_EXIT_OK : CLI_EXIT_FAILURE;
}

/* Plans before a run: gemini_plan_forecast(). SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/manager.h"
#include "base/abi.h"
#include "base/status.h"
#include "tracer/tracer.h"

/* Makes a manager for the plan, which no handle names, and frees it again. *text_out: the caller frees it. */
static gemini_status_t forecast_make(const gemini_config_t *config, const char *path, gemini_forecast_t *forecast_out,
                                     char **text_out) {
  if (!path) return gmi_fail(GEMINI_ERR_INVALID, 0, "trace_path is NULL");
  gmi_manager_t *m;
  gemini_status_t status = gmi_manager_make(config, true, &m);
  if (status) return status;
  gmi_lock(m, "gemini_plan_forecast");
  status = gmi_trace_forecast(m, path, forecast_out, text_out);
  gmi_unlock(m);
  gmi_failure_t failure;
  gmi_fail_keep(status, &failure);
  gmi_manager_free(m);
  return gmi_fail_again(&failure);
}

gemini_status_t gemini_plan_forecast(const gemini_config_t *config, const char *trace_path,
                                     gemini_forecast_t *forecast_out, uint64_t size_bytes, char *text_out,
                                     uint64_t *length_out) {
  gemini_forecast_t forecast = GEMINI_FORECAST_INIT;
  char *text = NULL;
  if (!text_out && size_bytes)
    API_RETURN(
        gmi_fail(GEMINI_ERR_INVALID, 0, "text_out is NULL but size_bytes is %llu", (unsigned long long)size_bytes));
  gemini_status_t status = forecast_make(config, trace_path, &forecast, &text);
  if (!status) status = gmi_struct_out(forecast_out, &forecast, sizeof forecast, GMI_V1_FORECAST, "forecast_out");
  if (!status && size_bytes) snprintf(text_out, size_bytes, "%s", text);
  if (!status && length_out) *length_out = strlen(text);
  free(text);
  API_RETURN(status);
}

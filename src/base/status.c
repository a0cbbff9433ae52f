/* The record of each thread's last failure, and checks of callers' structs. SPDX-License-Identifier: Apache-2.0
 *
 * The record is thread-local: no lock, and a thread sees only its own failures. It is never cleared by success. */
#include "base/status.h"
#include "base/abi.h"
#include "base/names.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local struct {
  gemini_status_t status;
  int64_t native_code;
  char operation[64];
  char message[440];
  uint64_t count; /* failures recorded */
} last;

gemini_status_t gmi_fail(gemini_status_t status, int64_t native_code, const char *format, ...) {
  va_list args;
  va_start(args, format);
  char message[sizeof last.message]; /* formatted aside: the recorded message may be one of the arguments */
  vsnprintf(message, sizeof message, format, args);
  va_end(args);
  gmi_text_escape(last.message, sizeof last.message, message); /* names are any bytes */
  last.status = status;
  last.native_code = native_code;
  last.operation[0] = 0;
  last.count++;
  return status;
}

gemini_status_t gmi_fail_device(gemini_status_t status, const char *format, ...) {
  char message[sizeof last.message];
  va_list args;
  va_start(args, format);
  vsnprintf(message, sizeof message, format, args);
  va_end(args);
  if (status != GEMINI_ERR_DEVICE && status != GEMINI_ERR_STATE && status != GEMINI_ERR_OOM_SYSTEM)
    return gmi_fail(status, 0, "%s", message);
  return gmi_fail(status, last.native_code, "%s: %s", message, last.message);
}

void gmi_fail_prefix(const char *format, ...) {
  char message[sizeof last.message];
  va_list args;
  va_start(args, format);
  int length = vsnprintf(message, sizeof message, format, args);
  va_end(args);
  if (length < 0 || (size_t)length >= sizeof message) return;
  snprintf(message + length, sizeof message - (size_t)length, "%s", last.message);
  gmi_text_escape(last.message, sizeof last.message, message);
}

void gmi_fail_operation(const char *operation) { snprintf(last.operation, sizeof last.operation, "%s", operation); }

const char *gmi_fail_message(void) { return last.message; }
int64_t gmi_fail_code(void) { return last.native_code; }
gemini_status_t gmi_fail_status(void) { return last.status; }
uint64_t gmi_fail_count(void) { return last.count; }

void gmi_fail_keep(gemini_status_t status, gmi_failure_t *failure_out) {
  failure_out->status = status;
  failure_out->native_code = last.native_code;
  memcpy(failure_out->message, last.message, sizeof last.message);
}
gemini_status_t gmi_fail_again(const gmi_failure_t *failure) {
  if (!failure->status) return GEMINI_OK;
  return gmi_fail(failure->status, failure->native_code, "%s", failure->message);
}

const char *gemini_status_string(gemini_status_t status) {
  switch (status) {
  case GEMINI_OK: return "success";
  case GEMINI_ERR_INVALID: return "invalid argument";
  case GEMINI_ERR_HANDLE: return "unknown, destroyed or foreign handle";
  case GEMINI_ERR_STATE: return "call out of order";
  case GEMINI_ERR_BUSY: return "object in use";
  case GEMINI_ERR_OOM_DEVICE: return "out of device memory";
  case GEMINI_ERR_OOM_HOST: return "out of host memory budget";
  case GEMINI_ERR_OOM_FILE: return "out of file space";
  case GEMINI_ERR_OOM_SYSTEM: return "out of process memory";
  case GEMINI_ERR_IO: return "input/output error";
  case GEMINI_ERR_FORMAT: return "malformed file";
  case GEMINI_ERR_NOT_FOUND: return "not found";
  case GEMINI_ERR_EXISTS: return "name taken";
  case GEMINI_ERR_UNSUPPORTED: return "not supported here";
  case GEMINI_ERR_DEVICE: return "device error";
  case GEMINI_ERR_PENDING: return "accepted, and not done yet";
  case GEMINI_ERR_PEER: return "another process of the group failed";
  default: return "unknown status";
  }
}

const char *gemini_version(void) { return GEMINI_VERSION_STRING; }

static gemini_status_t check_size(uint32_t size, size_t v1_size, const char *name) {
  if (size < v1_size || size > GMI_STRUCT_BYTES_MAX) {
    return gmi_fail(GEMINI_ERR_INVALID, 0, "%s: struct_size is %u, must be %zu to %d (was it set by its INIT macro?)",
                    name, size, v1_size, GMI_STRUCT_BYTES_MAX);
  }
  return GEMINI_OK;
}

gemini_status_t gmi_struct_in(void *ours, size_t our_size, const void *theirs, size_t v1_size, const char *name) {
  if (!theirs) return gmi_fail(GEMINI_ERR_INVALID, 0, "%s is NULL", name);
  uint32_t size;
  memcpy(&size, theirs, sizeof size);
  gemini_status_t status = check_size(size, v1_size, name);
  if (status) return status;
  for (size_t i = our_size; i < size; i++) {
    if (((const unsigned char *)theirs)[i]) {
      return gmi_fail(GEMINI_ERR_INVALID, 0,
                      "%s: byte %zu of %u is not 0, but this library (%s) knows the first %zu only", name, i, size,
                      GEMINI_VERSION_STRING, our_size);
    }
  }
  memset(ours, 0, our_size);
  memcpy(ours, theirs, size < our_size ? size : our_size);
  size = (uint32_t)our_size;
  memcpy(ours, &size, sizeof size);
  return GEMINI_OK;
}

gemini_status_t gmi_struct_out(void *theirs, void *ours, size_t our_size, size_t v1_size, const char *name) {
  if (!theirs) return gmi_fail(GEMINI_ERR_INVALID, 0, "%s is NULL", name);
  uint32_t size;
  memcpy(&size, theirs, sizeof size);
  gemini_status_t status = check_size(size, v1_size, name);
  if (status) return status;
  uint32_t filled = size < our_size ? size : (uint32_t)our_size;
  memcpy(ours, &filled, sizeof filled);
  memcpy(theirs, ours, filled);
  return GEMINI_OK;
}

gemini_status_t gemini_error_set(const gemini_error_info_t *info) {
  gemini_error_info_t ours;
  gemini_status_t status = gmi_struct_in(&ours, sizeof ours, info, GMI_V1_ERROR_INFO, "info");
  if (status) API_RETURN(status);
  if (ours.status >= 0)
    API_RETURN(gmi_fail(GEMINI_ERR_INVALID, 0, "info: status is %d, which is no error", ours.status));
  ours.operation[sizeof ours.operation - 1] = ours.message[sizeof ours.message - 1] = 0;
  gmi_fail(ours.status, ours.native_code, "%s", ours.message);
  gmi_fail_operation(ours.operation);
  return GEMINI_OK;
}

const char *gemini_error_text(void) {
  static _Thread_local char text[sizeof last.message + sizeof last.operation + 96];
  if (!last.status) return "no call has failed";
  char code[48] = "";
  if (last.native_code) snprintf(code, sizeof code, " (native code %lld)", (long long)last.native_code);
  snprintf(text, sizeof text, "%s%s%s: %s%s", last.operation, *last.operation ? ": " : "",
           gemini_status_string(last.status), last.message, code);
  return text;
}

gemini_status_t gemini_last_error(gemini_error_info_t *info_out) {
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  info.status = last.status;
  info.native_code = last.native_code;
  memcpy(info.operation, last.operation, sizeof info.operation);
  memcpy(info.message, last.message, sizeof info.message);
  /* A bad info_out is refused without recording a failure, which would overwrite the record that was asked for. */
  if (!info_out || info_out->struct_size < GMI_V1_ERROR_INFO || info_out->struct_size > GMI_STRUCT_BYTES_MAX)
    return GEMINI_ERR_INVALID;
  return gmi_struct_out(info_out, &info, sizeof info, GMI_V1_ERROR_INFO, "info_out");
}

/* A program that somebody else could have written: it says the library's version and opens a manager.
 * SPDX-License-Identifier: Apache-2.0 */
#include <gemini.h>
#include <gemini/graph.h>
#include <gemini/hook.h>
#include <gemini/topology.h>
#include <stdio.h>
#include <string.h>

static int failed(const char *what) {
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  if (gemini_last_error(&info) == GEMINI_OK) fprintf(stderr, "%s: %s: %s\n", what, info.operation, info.message);
  return 1;
}

int main(void) {
  gemini_config_t config = GEMINI_CONFIG_INIT;
  gemini_manager_t mgr = NULL;
  gemini_topology_t topology = NULL;
  if (strcmp(gemini_version(), GEMINI_VERSION_STRING) != 0) {
    fprintf(stderr, "header is %s, library is %s\n", GEMINI_VERSION_STRING, gemini_version());
    return 1;
  }
  config.device = GEMINI_DEVICE_SIMULATED;
  config.device_bytes = 64u << 20;
  config.host_bytes = 64u << 20;
  if (gemini_manager_open(&config, &mgr) != GEMINI_OK) return failed("open");
  if (gemini_hook_clear(mgr) != GEMINI_ERR_STATE) return failed("hook"); /* it serves no device */
  if (gemini_graph_destroy(mgr, NULL) != GEMINI_OK) return failed("graph");
  if (gemini_topology_close(topology) != GEMINI_OK) return failed("topology");
  if (gemini_manager_close(mgr) != GEMINI_OK) return failed("close");
  printf("gemini %s\n", gemini_version());
  return 0;
}

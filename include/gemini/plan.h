/* Plans before a run. SPDX-License-Identifier: Apache-2.0
 *
 * A trace file (docs/trace.md) describes one iteration: its arenas, its operators and what they access, and the rates
 * of the machine. gemini_plan_forecast() makes the plan that the library would follow within given budgets, and says
 * what the plan takes. It needs neither the memory nor the GPU that it plans for. Traces of sharded arenas
 * (gemini/group.h) have no gathers, so forecasts of them are those of ordinary arenas.
 */
#ifndef GEMINI_PLAN_H
#define GEMINI_PLAN_H

#include <gemini.h>

#ifdef __cplusplus
extern "C" {
#endif

/** @defgroup plan Plans before a run
 *  @{ */
/** What limits the duration of an iteration: the resource that is busy for longest. Later versions may have more. */
enum {
  GEMINI_BINDS_COMPUTE = 0,
  GEMINI_BINDS_FETCHES = 1, /* the link from the host to the device */
  GEMINI_BINDS_EVICTS = 2,  /* the link from the device to the host */
  GEMINI_BINDS_UPDATES = 3, /* updates on the host: its cores and its memory */
  GEMINI_BINDS_FILES = 4,
  GEMINI_BINDS_GATHERS = 5, /* of several ranks */
  GEMINI_BINDS_SUMS = 6     /* of several ranks */
};

typedef struct gemini_forecast {
  uint32_t struct_size;   /* bytes; set by GEMINI_FORECAST_INIT; on return, bytes filled */
  uint32_t lacks;         /* bit 1 << GEMINI_TIER_*: the tier's budget is below what is needed; 0: the iteration fits */
  uint32_t binds;         /* GEMINI_BINDS_* */
  uint32_t placement;     /* GEMINI_PLACEMENT_*, as configured */
  uint64_t chunk_bytes;   /* of the configuration, or else of the trace */
  uint64_t model_bytes;   /* chunks of all arenas */
  uint64_t device_needed; /* least device_bytes, with the margin, for which there is a plan; STATIC takes more */
  /* Least host_bytes with the given file_bytes. Where the plan has states stay on the device for want of room below,
   * what it takes with these there; so it may be less for a smaller host_bytes. */
  uint64_t host_needed;
  uint64_t file_needed; /* least file_bytes with the given host_bytes; 0 where no file tier is configured */
  /* The rest is of the plan; all 0 if lacks has the device's bit. */
  uint64_t device_bytes;               /* used at most, by chunks and non-model memory */
  uint64_t host_bytes;                 /* used; copies stay there while nothing else needs the room */
  uint64_t file_bytes;                 /* used between two iterations */
  uint64_t stays_bytes;                /* chunks that never leave the device */
  uint64_t fetch_bytes;                /* an iteration, from the host to the device */
  uint64_t evict_bytes;                /* an iteration, from the device to the host */
  uint64_t read_bytes;                 /* an iteration, from files; as many are written */
  uint64_t device_pieces, host_pieces; /* parts of updates by where they run */
  uint64_t step_ns;                    /* of an iteration */
  uint64_t stall_ns;                   /* of it, without compute */
  uint64_t compute_ns, fetch_ns, evict_ns, update_ns, file_ns; /* for how long each resource is busy in an iteration */
} gemini_forecast_t;
#define GEMINI_FORECAST_INIT \
  { sizeof(gemini_forecast_t), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/** Plans a recorded iteration for given budgets, without a manager, a GPU, files or memory for chunks.
 *  A budget that is too small is no error: forecast_out->lacks says which, and the needed bytes say how much it takes.
 *  The host, with files below it, has to have room for all chunks but the states that stay on the device for want of
 *  it: the first iterations have no plan.
 *  @param config  as for gemini_manager_open(), with these differences: budgets may exceed what the machine has; each
 *           budget, and all arenas together, may have 2^22 chunks at most; of the device only its sort counts; file_dir
 *           and checkpoint_name are not used. chunk_bytes 0: as in the trace. update_threads 0: as many as a manager on
 *           this machine would have. Borrowed until return
 *  @param trace_path  a file as gemini_trace_save() writes it. The arenas that it names are made for the plan; one that
 *           follows another has to come after it. A rate that is 0 is assumed
 *  @param forecast_out  allocated by the caller, struct_size set; borrowed until return
 *  @param size_bytes  room in text_out, with the NUL; 0 to ask for the length
 *  @param text_out  receives the plan in words, as gemini_plan_explain() writes it, with a NUL; empty where the device
 *           lacks room; may be NULL with size_bytes 0
 *  @param length_out  bytes that the text has without the NUL; may be NULL
 *  @retval GEMINI_ERR_INVALID  a value of the configuration is out of range; there are more than 2^22 chunks; or
 *           text_out is NULL and size_bytes is not 0
 *  @retval GEMINI_ERR_FORMAT  the file is no trace, or its arenas cannot exist
 *  @retval GEMINI_ERR_IO  the file could not be read
 *  @retval GEMINI_ERR_OOM_SYSTEM  no memory, addresses or threads for the planner
 *  Threads: any. Blocks while it plans: up to seconds for traces of many thousand operators. Since: 0.1 */
GEMINI_API gemini_status_t gemini_plan_forecast(const gemini_config_t *config, const char *trace_path,
                                                gemini_forecast_t *forecast_out, uint64_t size_bytes, char *text_out,
                                                uint64_t *length_out) GEMINI_MUST_CHECK;
/** @} */

#ifdef __cplusplus
}
#endif
#endif

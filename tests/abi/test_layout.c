/* Sizes, offsets and values that callers have compiled in, on LP64. A failing line means that a released program
 * would break: append to structs, never change them. abi.c checks that nothing is left out, and the target abi_update
 * writes the entries anew while a version has not been released. SPDX-License-Identifier: Apache-2.0 */
#include <stddef.h>

#include "gemini.h"
#include "gemini/address.h"
#include "gemini/graph.h"
#include "gemini/group.h"
#include "gemini/hook.h"
#include "gemini/plan.h"
#include "gemini/topology.h"

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

SIZE(gemini_error_info_t, 520);
OFFSET(gemini_error_info_t, struct_size, 0);
OFFSET(gemini_error_info_t, status, 4);
OFFSET(gemini_error_info_t, native_code, 8);
OFFSET(gemini_error_info_t, operation, 16);
OFFSET(gemini_error_info_t, message, 80);

SIZE(gemini_config_t, 152);
OFFSET(gemini_config_t, struct_size, 0);
OFFSET(gemini_config_t, flags, 4);
OFFSET(gemini_config_t, placement, 8);
OFFSET(gemini_config_t, device, 12);
OFFSET(gemini_config_t, device_ordinal, 16);
OFFSET(gemini_config_t, warmup_iterations, 20);
OFFSET(gemini_config_t, update_threads, 24);
OFFSET(gemini_config_t, log_level, 28);
OFFSET(gemini_config_t, device_bytes, 32);
OFFSET(gemini_config_t, device_margin_bytes, 40);
OFFSET(gemini_config_t, host_bytes, 48);
OFFSET(gemini_config_t, file_bytes, 56);
OFFSET(gemini_config_t, chunk_bytes, 64);
OFFSET(gemini_config_t, static_param_fraction, 72);
OFFSET(gemini_config_t, static_optim_fraction, 80);
OFFSET(gemini_config_t, sim_h2d_bytes_per_s, 88);
OFFSET(gemini_config_t, sim_d2h_bytes_per_s, 96);
OFFSET(gemini_config_t, file_dir, 104);
OFFSET(gemini_config_t, log_fn, 112);
OFFSET(gemini_config_t, log_user, 120);
OFFSET(gemini_config_t, file_engine, 128);
OFFSET(gemini_config_t, cache_policy, 132);
OFFSET(gemini_config_t, checkpoint_name, 136);
OFFSET(gemini_config_t, watchdog_ns, 144);

SIZE(gemini_arena_config_t, 64);
OFFSET(gemini_arena_config_t, struct_size, 0);
OFFSET(gemini_arena_config_t, kind, 4);
OFFSET(gemini_arena_config_t, element_bytes, 8);
OFFSET(gemini_arena_config_t, flags, 12);
OFFSET(gemini_arena_config_t, capacity_bytes, 16);
OFFSET(gemini_arena_config_t, name, 24);
OFFSET(gemini_arena_config_t, like, 32);
OFFSET(gemini_arena_config_t, reuse, 40);
OFFSET(gemini_arena_config_t, group, 48);
OFFSET(gemini_arena_config_t, zero_stage, 56);
OFFSET(gemini_arena_config_t, dtype, 60);

SIZE(gemini_arena_info_t, 56);
OFFSET(gemini_arena_info_t, struct_size, 0);
OFFSET(gemini_arena_info_t, kind, 4);
OFFSET(gemini_arena_info_t, base, 8);
OFFSET(gemini_arena_info_t, size_bytes, 16);
OFFSET(gemini_arena_info_t, capacity_bytes, 24);
OFFSET(gemini_arena_info_t, chunk_bytes, 32);
OFFSET(gemini_arena_info_t, tensor_count, 40);
OFFSET(gemini_arena_info_t, element_bytes, 48);
OFFSET(gemini_arena_info_t, reserved, 52);

SIZE(gemini_tensor_info_t, 176);
OFFSET(gemini_tensor_info_t, struct_size, 0);
OFFSET(gemini_tensor_info_t, state, 4);
OFFSET(gemini_tensor_info_t, address, 8);
OFFSET(gemini_tensor_info_t, size_bytes, 16);
OFFSET(gemini_tensor_info_t, offset_bytes, 24);
OFFSET(gemini_tensor_info_t, arena, 32);
OFFSET(gemini_tensor_info_t, users, 40);
OFFSET(gemini_tensor_info_t, name, 48);

SIZE(gemini_object_t, 8);
OFFSET(gemini_object_t, tensor, 0);
OFFSET(gemini_object_t, arena, 0);

SIZE(gemini_access_t, 48);
OFFSET(gemini_access_t, struct_size, 0);
OFFSET(gemini_access_t, mode, 4);
OFFSET(gemini_access_t, tier, 8);
OFFSET(gemini_access_t, reserved, 12);
OFFSET(gemini_access_t, object, 16);
OFFSET(gemini_access_t, offset_bytes, 24);
OFFSET(gemini_access_t, size_bytes, 32);
OFFSET(gemini_access_t, ptr, 40);

SIZE(gemini_update_span_t, 168);
OFFSET(gemini_update_span_t, struct_size, 0);
OFFSET(gemini_update_span_t, tier, 4);
OFFSET(gemini_update_span_t, first_element, 8);
OFFSET(gemini_update_span_t, element_count, 16);
OFFSET(gemini_update_span_t, stream, 24);
OFFSET(gemini_update_span_t, arena_count, 32);
OFFSET(gemini_update_span_t, pass, 36);
OFFSET(gemini_update_span_t, ptr, 40);
OFFSET(gemini_update_span_t, out, 104);

SIZE(gemini_update_t, 88);
OFFSET(gemini_update_t, struct_size, 0);
OFFSET(gemini_update_t, flags, 4);
OFFSET(gemini_update_t, arenas, 8);
OFFSET(gemini_update_t, modes, 16);
OFFSET(gemini_update_t, arena_count, 24);
OFFSET(gemini_update_t, reserved, 28);
OFFSET(gemini_update_t, first_element, 32);
OFFSET(gemini_update_t, element_count, 40);
OFFSET(gemini_update_t, stream, 48);
OFFSET(gemini_update_t, fn, 56);
OFFSET(gemini_update_t, user, 64);
OFFSET(gemini_update_t, user_bytes, 72);
OFFSET(gemini_update_t, try_fn, 80);

SIZE(gemini_stats_t, 176);
OFFSET(gemini_stats_t, struct_size, 0);
OFFSET(gemini_stats_t, file_engine, 4);
OFFSET(gemini_stats_t, model_bytes, 8);
OFFSET(gemini_stats_t, nonmodel_bytes, 16);
OFFSET(gemini_stats_t, nonmodel_peak_bytes, 24);
OFFSET(gemini_stats_t, chunk_bytes, 32);
OFFSET(gemini_stats_t, acquire_hits, 40);
OFFSET(gemini_stats_t, acquire_misses, 48);
OFFSET(gemini_stats_t, stall_ns, 56);
OFFSET(gemini_stats_t, iterations, 64);
OFFSET(gemini_stats_t, planned_iterations, 72);
OFFSET(gemini_stats_t, departures, 80);
OFFSET(gemini_stats_t, plans, 88);
OFFSET(gemini_stats_t, predicted_step_ns, 96);
OFFSET(gemini_stats_t, measured_step_ns, 104);
OFFSET(gemini_stats_t, planned_fetch_bytes, 112);
OFFSET(gemini_stats_t, planned_evict_bytes, 120);
OFFSET(gemini_stats_t, op_peak_error_bytes, 128);
OFFSET(gemini_stats_t, pending_updates, 136);
OFFSET(gemini_stats_t, host_alloc_bytes, 144);
OFFSET(gemini_stats_t, speculated_elements, 152);
OFFSET(gemini_stats_t, committed_elements, 160);
OFFSET(gemini_stats_t, dropped_elements, 168);

SIZE(gemini_tier_stats_t, 32);
OFFSET(gemini_tier_stats_t, struct_size, 0);
OFFSET(gemini_tier_stats_t, tier, 4);
OFFSET(gemini_tier_stats_t, budget_bytes, 8);
OFFSET(gemini_tier_stats_t, used_bytes, 16);
OFFSET(gemini_tier_stats_t, peak_bytes, 24);

SIZE(gemini_link_stats_t, 48);
OFFSET(gemini_link_stats_t, struct_size, 0);
OFFSET(gemini_link_stats_t, reason, 4);
OFFSET(gemini_link_stats_t, from_tier, 8);
OFFSET(gemini_link_stats_t, to_tier, 12);
OFFSET(gemini_link_stats_t, from_ordinal, 16);
OFFSET(gemini_link_stats_t, to_ordinal, 20);
OFFSET(gemini_link_stats_t, bw_bytes_per_s, 24);
OFFSET(gemini_link_stats_t, moved_bytes, 32);
OFFSET(gemini_link_stats_t, moved_chunks, 40);

SIZE(gemini_group_id_t, 512);
OFFSET(gemini_group_id_t, bytes, 0);

SIZE(gemini_comm_t, 88);
OFFSET(gemini_comm_t, struct_size, 0);
OFFSET(gemini_comm_t, flags, 4);
OFFSET(gemini_comm_t, user, 8);
OFFSET(gemini_comm_t, all_gather, 16);
OFFSET(gemini_comm_t, broadcast, 24);
OFFSET(gemini_comm_t, reduce_scatter, 32);
OFFSET(gemini_comm_t, all_reduce, 40);
OFFSET(gemini_comm_t, exchange, 48);
OFFSET(gemini_comm_t, poll, 56);
OFFSET(gemini_comm_t, abort, 64);
OFFSET(gemini_comm_t, register_memory, 72);
OFFSET(gemini_comm_t, unregister_memory, 80);

SIZE(gemini_group_config_t, 64);
OFFSET(gemini_group_config_t, struct_size, 0);
OFFSET(gemini_group_config_t, flags, 4);
OFFSET(gemini_group_config_t, rank, 8);
OFFSET(gemini_group_config_t, ranks, 12);
OFFSET(gemini_group_config_t, id, 16);
OFFSET(gemini_group_config_t, deadline_ns, 24);
OFFSET(gemini_group_config_t, nccl_comms, 32);
OFFSET(gemini_group_config_t, comms, 40);
OFFSET(gemini_group_config_t, shard_ranks, 48);
OFFSET(gemini_group_config_t, bucket_bytes, 56);
OFFSET(gemini_group_config_t, reserved, 52);

SIZE(gemini_group_stats_t, 112);
OFFSET(gemini_group_stats_t, struct_size, 0);
OFFSET(gemini_group_stats_t, rank, 4);
OFFSET(gemini_group_stats_t, ranks, 8);
OFFSET(gemini_group_stats_t, shard_ranks, 12);
OFFSET(gemini_group_stats_t, gathered_chunks, 16);
OFFSET(gemini_group_stats_t, gathered_bytes, 24);
OFFSET(gemini_group_stats_t, reduced_chunks, 32);
OFFSET(gemini_group_stats_t, fetched_bytes, 40);
OFFSET(gemini_group_stats_t, stored_bytes, 48);
OFFSET(gemini_group_stats_t, reduced_bytes, 56);
OFFSET(gemini_group_stats_t, planned_gathered_bytes, 64);
OFFSET(gemini_group_stats_t, planned_reduced_bytes, 72);
OFFSET(gemini_group_stats_t, planned_fetched_bytes, 80);
OFFSET(gemini_group_stats_t, gather_wait_ns, 88);
OFFSET(gemini_group_stats_t, sum_wait_ns, 96);
OFFSET(gemini_group_stats_t, bucket_chunks, 104);
OFFSET(gemini_group_stats_t, plan_changes, 108);

SIZE(gemini_location_t, 40);
OFFSET(gemini_location_t, struct_size, 0);
OFFSET(gemini_location_t, reserved, 4);
OFFSET(gemini_location_t, arena, 8);
OFFSET(gemini_location_t, arena_offset_bytes, 16);
OFFSET(gemini_location_t, tensor, 24);
OFFSET(gemini_location_t, tensor_offset_bytes, 32);

SIZE(gemini_forecast_t, 184);
OFFSET(gemini_forecast_t, struct_size, 0);
OFFSET(gemini_forecast_t, lacks, 4);
OFFSET(gemini_forecast_t, binds, 8);
OFFSET(gemini_forecast_t, placement, 12);
OFFSET(gemini_forecast_t, chunk_bytes, 16);
OFFSET(gemini_forecast_t, model_bytes, 24);
OFFSET(gemini_forecast_t, device_needed, 32);
OFFSET(gemini_forecast_t, host_needed, 40);
OFFSET(gemini_forecast_t, file_needed, 48);
OFFSET(gemini_forecast_t, device_bytes, 56);
OFFSET(gemini_forecast_t, host_bytes, 64);
OFFSET(gemini_forecast_t, file_bytes, 72);
OFFSET(gemini_forecast_t, stays_bytes, 80);
OFFSET(gemini_forecast_t, fetch_bytes, 88);
OFFSET(gemini_forecast_t, evict_bytes, 96);
OFFSET(gemini_forecast_t, read_bytes, 104);
OFFSET(gemini_forecast_t, device_pieces, 112);
OFFSET(gemini_forecast_t, host_pieces, 120);
OFFSET(gemini_forecast_t, step_ns, 128);
OFFSET(gemini_forecast_t, stall_ns, 136);
OFFSET(gemini_forecast_t, compute_ns, 144);
OFFSET(gemini_forecast_t, fetch_ns, 152);
OFFSET(gemini_forecast_t, evict_ns, 160);
OFFSET(gemini_forecast_t, update_ns, 168);
OFFSET(gemini_forecast_t, file_ns, 176);

SIZE(gemini_topology_object_t, 176);
OFFSET(gemini_topology_object_t, struct_size, 0);
OFFSET(gemini_topology_object_t, kind, 4);
OFFSET(gemini_topology_object_t, system_index, 8);
OFFSET(gemini_topology_object_t, node, 12);
OFFSET(gemini_topology_object_t, cpus, 16);
OFFSET(gemini_topology_object_t, reserved, 20);
OFFSET(gemini_topology_object_t, size_bytes, 24);
OFFSET(gemini_topology_object_t, pci, 32);
OFFSET(gemini_topology_object_t, name, 48);

VALUE(GEMINI_OK, 0);
VALUE(GEMINI_ERR_INVALID, -1);
VALUE(GEMINI_ERR_HANDLE, -2);
VALUE(GEMINI_ERR_STATE, -3);
VALUE(GEMINI_ERR_BUSY, -4);
VALUE(GEMINI_ERR_OOM_DEVICE, -5);
VALUE(GEMINI_ERR_OOM_HOST, -6);
VALUE(GEMINI_ERR_OOM_FILE, -7);
VALUE(GEMINI_ERR_OOM_SYSTEM, -8);
VALUE(GEMINI_ERR_IO, -9);
VALUE(GEMINI_ERR_FORMAT, -10);
VALUE(GEMINI_ERR_NOT_FOUND, -11);
VALUE(GEMINI_ERR_EXISTS, -12);
VALUE(GEMINI_ERR_UNSUPPORTED, -13);
VALUE(GEMINI_ERR_DEVICE, -14);
VALUE(GEMINI_ERR_PENDING, -15);
VALUE(GEMINI_ERR_PEER, -16);
VALUE(GEMINI_TIER_DEVICE, 0);
VALUE(GEMINI_TIER_HOST, 1);
VALUE(GEMINI_TIER_FILE, 2);
VALUE(GEMINI_TIER_COUNT, 3);
VALUE(GEMINI_PLACEMENT_AUTO, 0);
VALUE(GEMINI_PLACEMENT_CUDA, 1);
VALUE(GEMINI_PLACEMENT_CPU, 2);
VALUE(GEMINI_PLACEMENT_STATIC, 3);
VALUE(GEMINI_CACHE_LRU, 0);
VALUE(GEMINI_CACHE_FREQUENT, 1);
VALUE(GEMINI_CACHE_LEAST_STALE, 2);
VALUE(GEMINI_DEVICE_SIMULATED, 0);
VALUE(GEMINI_DEVICE_CUDA, 1);
VALUE(GEMINI_FILE_ENGINE_AUTO, 0);
VALUE(GEMINI_FILE_ENGINE_URING, 1);
VALUE(GEMINI_FILE_ENGINE_THREADS, 2);
VALUE(GEMINI_LOG_ERROR, 1);
VALUE(GEMINI_LOG_WARNING, 2);
VALUE(GEMINI_LOG_INFO, 3);
VALUE(GEMINI_LOG_DEBUG, 4);
VALUE(GEMINI_CONFIG_STRICT, 1);
VALUE(GEMINI_CONFIG_EXPLAIN_FAULTS, 2);
VALUE(GEMINI_KIND_PARAM, 0);
VALUE(GEMINI_KIND_GRAD, 1);
VALUE(GEMINI_KIND_MASTER, 2);
VALUE(GEMINI_KIND_MOMENTUM, 3);
VALUE(GEMINI_KIND_VARIANCE, 4);
VALUE(GEMINI_KIND_OTHER, 5);
VALUE(GEMINI_ARENA_GROWS, 1);
VALUE(GEMINI_ZERO_AUTO, 0);
VALUE(GEMINI_ZERO_STATES, 1);
VALUE(GEMINI_ZERO_GRADIENTS, 2);
VALUE(GEMINI_ZERO_PARAMS, 3);
VALUE(GEMINI_STATE_FREE, 0);
VALUE(GEMINI_STATE_HOLD, 1);
VALUE(GEMINI_STATE_HOLD_AFTER_FWD, 2);
VALUE(GEMINI_STATE_HOLD_AFTER_BWD, 3);
VALUE(GEMINI_STATE_COMPUTE, 4);
VALUE(GEMINI_STATE_READY_FOR_REDUCE, 5);
VALUE(GEMINI_STATE_COUNT, 6);
VALUE(GEMINI_PHASE_NONE, 0);
VALUE(GEMINI_PHASE_FORWARD, 1);
VALUE(GEMINI_PHASE_BACKWARD, 2);
VALUE(GEMINI_PHASE_UPDATE, 3);
VALUE(GEMINI_READ, 1);
VALUE(GEMINI_WRITE, 2);
VALUE(GEMINI_READ_WRITE, 3);
VALUE(GEMINI_DTYPE_F32, 0);
VALUE(GEMINI_DTYPE_BF16, 1);
VALUE(GEMINI_DTYPE_F16, 2);
VALUE(GEMINI_DTYPE_F64, 3);
VALUE(GEMINI_UPDATE_LATE, 1);
VALUE(GEMINI_UPDATE_SPECULATE, 2);
VALUE(GEMINI_UPDATE_COMMIT, 4);
VALUE(GEMINI_UPDATE_PASSES, 16);
VALUE(GEMINI_PASS_BOTH, 0);
VALUE(GEMINI_PASS_RESULTS, 1);
VALUE(GEMINI_PASS_STATES, 2);
VALUE(GEMINI_UPDATE_PART, 8);
VALUE(GEMINI_REASON_DEMAND, 0);
VALUE(GEMINI_REASON_PLAN, 1);
VALUE(GEMINI_REASON_PRESSURE, 2);
VALUE(GEMINI_REASON_CALLER, 3);
VALUE(GEMINI_REASON_UPDATE, 4);
VALUE(GEMINI_REASON_COUNT, 5);
VALUE(GEMINI_GROUP_RANKS, 1024);
VALUE(GEMINI_GROUP_ID_BYTES, 512);
VALUE(GEMINI_TRANSPORT_SHARED, 0);
VALUE(GEMINI_TRANSPORT_NCCL, 1);
VALUE(GEMINI_COMM_QUEUES, 1);
VALUE(GEMINI_GROUP_RANK_ORDER, 1);
VALUE(GEMINI_GROUP_REGISTER, 2);
VALUE(GEMINI_GROUP_COMMS, 3);
VALUE(GEMINI_GROUP_HYBRID_COMMS, 4);
VALUE(GEMINI_BINDS_COMPUTE, 0);
VALUE(GEMINI_BINDS_FETCHES, 1);
VALUE(GEMINI_BINDS_EVICTS, 2);
VALUE(GEMINI_BINDS_UPDATES, 3);
VALUE(GEMINI_BINDS_FILES, 4);
VALUE(GEMINI_BINDS_GATHERS, 5);
VALUE(GEMINI_BINDS_SUMS, 6);
VALUE(GEMINI_OBJECT_NODE, 0);
VALUE(GEMINI_OBJECT_GPU, 1);
VALUE(GEMINI_OBJECT_DISK, 2);
VALUE(GEMINI_OBJECT_COUNT, 3);
VALUE(GEMINI_DISTANCE_SAME, 0);
VALUE(GEMINI_DISTANCE_SWITCH, 1);
VALUE(GEMINI_DISTANCE_BRIDGE, 2);
VALUE(GEMINI_DISTANCE_NODE, 3);
VALUE(GEMINI_DISTANCE_PACKAGE, 4);
VALUE(GEMINI_DISTANCE_MACHINE, 5);
VALUE(GEMINI_DISTANCE_UNKNOWN, 6);

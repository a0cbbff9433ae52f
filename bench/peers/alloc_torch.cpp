// Loops of allocations by PyTorch's own allocator and by libgemini's functions, for alloc_torch.py, which compiles this.
// SPDX-License-Identifier: Apache-2.0
//
// PyTorch's is called as every tensor of it calls it: c10::Allocator, which asks for the current device and stream. Ours
// is told both, as PyTorch does when it is plugged in; with `ask` the loop asks for them each time, too, so that both do
// the same work.
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstdint>
#include <vector>

#include "gemini.h"
#include "gemini/hook.h"

namespace {
struct peer {
  c10::Allocator *torch;       // NULL: ours
  const c10::impl::DeviceGuardImplInterface *guard; // NULL: nothing is asked
  void *stream;
  void *get(uint64_t size) const {
    if (torch) return torch->raw_allocate(size);
    int device = 0;
    if (guard) {
      device = guard->getDevice().index();
      c10::Stream current = guard->getStream(c10::Device(guard->type(), static_cast<c10::DeviceIndex>(device)));
      if (current.id() != 0) return nullptr; // the default stream, which is told below
      if (device < 0) device = 0;            // the CPU's
    }
    return gemini_torch_malloc(static_cast<ptrdiff_t>(size), device, stream);
  }
  void put(void *ptr, uint64_t size) const {
    if (torch) torch->raw_deallocate(ptr);
    else gemini_torch_free(ptr, static_cast<ptrdiff_t>(size), 0, stream);
  }
};
c10::DeviceType type_of(int cuda) { return cuda ? c10::DeviceType::CUDA : c10::DeviceType::CPU; }
c10::Allocator *theirs;
peer peer_of(int which, int cuda, void *stream) {
  return { which == 0 ? theirs : nullptr,
           which == 2 ? c10::impl::getDeviceGuardImpl(type_of(cuda)) : nullptr, stream };
}
double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}
} // namespace

extern "C" {
// allocator: PyTorch's own, if it was found by its symbol; else the registered one. 0, or 1: there is none.
int peer_torch(int cuda, void *allocator) {
  try {
    theirs = allocator ? static_cast<c10::Allocator *>(allocator) : c10::GetAllocator(type_of(cuda));
  } catch (...) {
    theirs = nullptr;
  }
  return !theirs;
}
// Opens a manager that serves device 0, in the middle of an operator. 0, or what failed.
int peer_open(int cuda, uint64_t device_bytes, gemini_manager_t *mgr_out, void **stream_out) {
  gemini_config_t config = GEMINI_CONFIG_INIT;
  config.device = cuda ? GEMINI_DEVICE_CUDA : GEMINI_DEVICE_SIMULATED;
  config.chunk_bytes = 2 << 20;
  config.device_bytes = device_bytes;
  config.host_bytes = 64 << 20;
  config.update_threads = 1;
  gemini_stream_t stream = 0;
  gemini_status_t status = gemini_manager_open(&config, mgr_out);
  if (!status && !cuda) status = gemini_stream_create(*mgr_out, &stream);
  if (!status) status = gemini_hook_set(*mgr_out, 0);
  if (!status) status = gemini_iteration_begin(*mgr_out);
  if (!status) status = gemini_op_begin(*mgr_out, "alloc", GEMINI_STREAM_CALLER);
  *stream_out = reinterpret_cast<void *>(stream);
  return status;
}
int peer_close(gemini_manager_t mgr, uint64_t *held_out) {
  gemini_tier_stats_t stats = GEMINI_TIER_STATS_INIT;
  gemini_status_t status = gemini_tier_stats(mgr, GEMINI_TIER_DEVICE, &stats);
  *held_out = stats.peak_bytes;
  if (!status) status = gemini_op_end(mgr);
  if (!status) status = gemini_iteration_end(mgr);
  gemini_status_t closed = gemini_manager_close(mgr);
  return status ? status : closed;
}
// which: 0 PyTorch's, 1 ours, 2 ours with asking. Seconds a pair; negative: an allocation failed.
double peer_pairs(int which, int cuda, void *stream, uint64_t size, uint64_t pairs) {
  const peer p = peer_of(which, cuda, stream);
  auto begin = std::chrono::steady_clock::now();
  for (uint64_t i = 0; i < pairs; i++) {
    void *ptr = p.get(size);
    if (!ptr) return -1;
    p.put(ptr, size);
  }
  return seconds_since(begin) / static_cast<double>(pairs);
}
// events: id, bytes (0: a free). Everything is freed at its end.
double peer_trace(int which, int cuda, void *stream, const uint64_t *events, uint64_t count, uint64_t ids) {
  const peer p = peer_of(which, cuda, stream);
  std::vector<std::pair<void *, uint64_t>> blocks(ids);
  auto begin = std::chrono::steady_clock::now();
  for (uint64_t i = 0; i < count; i++) {
    auto &block = blocks[events[2 * i]];
    if (events[2 * i + 1]) {
      block = { p.get(events[2 * i + 1]), events[2 * i + 1] };
      if (!block.first) return -1;
    } else {
      p.put(block.first, block.second);
      block.first = nullptr;
    }
  }
  double seconds = seconds_since(begin) / (static_cast<double>(count) / 2);
  for (auto &block : blocks)
    if (block.first) p.put(block.first, block.second);
  return seconds;
}
}

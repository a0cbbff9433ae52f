// A program of somebody else's over gemini.hpp: it trains beyond its device budget, and fails in all ways that the header
// promises something for. SPDX-License-Identifier: Apache-2.0
#include <gemini.hpp>

#include <cstdio>
#include <cstdlib>
#include <type_traits>

#define REQUIRE(condition) \
  if (!(condition)) std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition), std::exit(1)

template <class T> void is_moved_only() {
  static_assert(!std::is_copy_constructible<T>::value && !std::is_copy_assignable<T>::value, "it can be copied");
  static_assert(std::is_nothrow_move_constructible<T>::value, "it cannot be moved");
  static_assert(std::is_nothrow_destructible<T>::value, "its destructor throws");
}

const std::size_t LAYERS = 8, ELEMENTS = 1 << 16; // layers of 256 KiB

static gemini_config_t config_of(std::uint64_t device_bytes) {
  gemini_config_t config = GEMINI_CONFIG_INIT;
  config.device_bytes = device_bytes, config.host_bytes = 16 << 20, config.chunk_bytes = 64 << 10;
  config.flags = GEMINI_CONFIG_STRICT;
  return config;
}

static gemini_arena_config_t arena_of(std::uint32_t kind, gemini_arena_t like = NULL) {
  gemini_arena_config_t config = GEMINI_ARENA_CONFIG_INIT;
  config.kind = kind, config.element_bytes = sizeof(float), config.like = like;
  return config;
}

static void call(void *run) { (*static_cast<void (**)()>(run))(); }
static float *weight, *gradient;
static void backward() {
  for (std::size_t i = 0; i < ELEMENTS; i++) gradient[i] = weight[i] - 1;
}
static void update() {
  for (std::size_t i = 0; i < ELEMENTS; i++) weight[i] -= gradient[i] / 2;
}

static void train(gemini::manager &mgr) {
  gemini::arena weights(mgr, arena_of(GEMINI_KIND_PARAM));
  gemini::arena gradients(mgr, arena_of(GEMINI_KIND_GRAD, weights.get()));
  std::vector<gemini::tensor> layers;
  for (std::size_t i = 0; i < LAYERS; i++) { // the vector moves its elements
    layers.push_back(gemini::tensor(mgr, weights, "layer " + std::to_string(i), ELEMENTS * sizeof(float)));
  }
  gemini::stream stream(mgr);
  void (*compute)() = backward, (*change)() = update;
  for (int step = 0; step < 5; step++) {
    gemini::iteration iteration(mgr);
    for (const gemini::tensor &layer : layers) {
      const gemini_tensor_t of = gemini::counterpart(mgr, layer, gradients);
      {
        gemini::op op(mgr, "backward", stream,
                      { gemini::access(layer, gemini::mode::read), gemini::access(of, gemini::mode::write) });
        gemini::memory scratch(mgr, 4096, stream);
        REQUIRE(scratch.data());
        weight = op.as<float>(0), gradient = op.as<float>(1);
        gemini::check(gemini_stream_call(mgr.get(), stream.get(), call, &compute));
        gemini::check(gemini_stream_synchronize(mgr.get(), stream.get())); // as two variables serve all layers
      } // its end is the operator's
      gemini::op op(mgr, "update", stream);
      gemini::acquired used(
          mgr, { gemini::access(layer, gemini::mode::read_write), gemini::access(of, gemini::mode::read) }, stream);
      weight = used.as<float>(0), gradient = used.as<float>(1);
      gemini::check(gemini_stream_call(mgr.get(), stream.get(), call, &change));
      gemini::check(gemini_stream_synchronize(mgr.get(), stream.get()));
      used.release();
      REQUIRE(used.size() == 0);
      op.end();
    }
    iteration.end();
  }
  for (const gemini::tensor &layer : layers) {
    gemini::acquired read(mgr, { gemini::access(layer, gemini::mode::read, gemini::tier::host, 4, 8) });
    REQUIRE(read.as<const float>(0)[0] == 1 - 1.f / 32 && read.as<const float>(0)[1] == 1 - 1.f / 32);
  }
  const gemini_stats_t stats = mgr.stats();
  REQUIRE(stats.planned_iterations == 4 && stats.nonmodel_bytes == 0);
  REQUIRE(stats.model_bytes >= 5 * mgr.tier_stats(gemini::tier::device).budget_bytes);
  REQUIRE(mgr.tier_stats(gemini::tier::device).peak_bytes <= 768 << 10);
  REQUIRE(mgr.explain().find("chunks") != std::string::npos && mgr.dump().size() > 100);
  REQUIRE(mgr.stats_text().find("planned_iterations: 4\n") != std::string::npos);
}

template <class F> static gemini_status_t status_of(F run, const char *text) {
  try {
    run();
  } catch (const gemini::error &error) {
    if (std::string(error.what()).find(text) == std::string::npos) std::fprintf(stderr, "%s\n", error.what());
    REQUIRE(std::string(error.what()).find(text) != std::string::npos);
    return error.status();
  }
  return GEMINI_OK;
}

static void fail(gemini::manager &mgr) {
  REQUIRE(status_of([] { gemini::manager small(config_of(1)); }, "chunk_bytes is 65536") == GEMINI_ERR_INVALID);
  gemini::arena arena(mgr, arena_of(GEMINI_KIND_PARAM));
  gemini::tensor large(mgr, arena, "large", 2 << 20), small(mgr, arena, "small", 64 << 10);
  REQUIRE(status_of([&] { gemini::tensor again(mgr, arena, "small", 4); }, "small") == GEMINI_ERR_EXISTS);
  const std::vector<gemini_access_t> use = { gemini::access(small, gemini::mode::read_write) };
  gemini_access_t all = gemini::access(large, gemini::mode::read);
  // An exception in the middle ends all that is open, the innermost first.
  try {
    gemini::iteration iteration(mgr);
    gemini::op op(mgr, "op", gemini::caller, use);
    gemini::acquired more(mgr, use);
    REQUIRE(status_of([&] { gemini::acquired none(mgr, { all }); }, "more bytes of device memory") ==
            GEMINI_ERR_OOM_DEVICE);
    REQUIRE(status_of([&] { gemini::op none(mgr, "inner", gemini::caller); }, "op") == GEMINI_ERR_STATE);
    REQUIRE(status_of([&] { iteration.end(); }, "op") == GEMINI_ERR_STATE); // and it stays open
    throw 7;
  } catch (int) {
  }
  gemini::iteration iteration(mgr); // none is open
  iteration.phase(GEMINI_PHASE_FORWARD);
  iteration.end(), iteration.end();
  // Moves: what was moved from ends nothing.
  gemini::acquired first(mgr, use);
  gemini::acquired second(std::move(first));
  REQUIRE(first.size() == 0 && second.size() == 1 && second.as<char>(0));
  REQUIRE(status_of([&] { mgr.close(); }, "small") == GEMINI_ERR_BUSY && mgr.get()); // and it stays open
  first = std::move(second);
  bool thrown = false;
  try {
    second.as<char>(0);
  } catch (const std::out_of_range &) {
    thrown = true;
  }
  REQUIRE(thrown);
  REQUIRE(status_of([&] { arena.destroy(); }, "small") == GEMINI_ERR_BUSY && arena.get());
  first = gemini::acquired(mgr, use); // one is released
  first.release(), first.release();
  small.destroy(), small.destroy();
  REQUIRE(!small.get());
  for (int i = 0; i < 60; i++) { // each is gone before the next: of the name there is one, of streams 48
    gemini::tensor named(mgr, arena, "small", 4);
    gemini::stream passing(mgr);
  }
  REQUIRE(status_of([] { gemini::check(GEMINI_ERR_FORMAT); }, gemini_status_string(GEMINI_ERR_FORMAT)) ==
          GEMINI_ERR_FORMAT); // of no call of this thread's
  REQUIRE(status_of([&] { gemini::check(gemini_zero(mgr.get(), NULL)); }, "gemini_zero") == GEMINI_ERR_INVALID);
  mgr.budget_set(gemini::tier::device, 4 << 20);
  gemini::acquired whole(mgr, { all, gemini::access(arena, gemini::mode::read, gemini::tier::device, 0, 4) });
  REQUIRE(whole.as<char>(0) == whole.as<char>(1));
  gemini::acquired at(mgr, { gemini::access_at(whole.as<char>(0), 4, gemini::mode::read) });
  REQUIRE(at.as<char>(0) == whole.as<char>(0));
}

int main() {
  is_moved_only<gemini::manager>(), is_moved_only<gemini::arena>(), is_moved_only<gemini::tensor>();
  is_moved_only<gemini::stream>(), is_moved_only<gemini::acquired>(), is_moved_only<gemini::op>();
  is_moved_only<gemini::iteration>(), is_moved_only<gemini::memory>();
  gemini::manager mgr(config_of(768 << 10));
  train(mgr);
  fail(mgr);
  gemini::manager moved(std::move(mgr));
  REQUIRE(!mgr.get() && moved.get());
  gemini::arena outlives(moved, arena_of(GEMINI_KIND_OTHER));
  moved.close(), moved.close();
  std::printf("gemini %s\n", gemini_version());
}

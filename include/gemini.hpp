/* libgemini for C++11: objects that end what they began, and failures as exceptions.
 * SPDX-License-Identifier: Apache-2.0
 *
 *     gemini::manager mgr(config);                            // gemini_config_t
 *     gemini::arena weights(mgr, arena_config);               // gemini_arena_config_t
 *     gemini::tensor layer(mgr, weights, "layer", bytes);
 *     gemini::stream stream(mgr);
 *     gemini::iteration step(mgr);
 *     {
 *       gemini::op forward(mgr, "forward", stream, { gemini::access(layer, gemini::mode::read) });
 *       launch(forward.as<const float>(0), stream);
 *       forward.end();
 *     }
 *     step.end();
 *     mgr.close();
 *
 * It is a header alone, over the C functions of gemini.h, whose comments say what each of them does. Both can be used
 * together: get() gives an object's handle, and gemini::check() makes an exception of a status:
 *
 *     gemini::check(gemini_update_wait(mgr.get()));
 *
 * Objects can be moved and not copied. One that was moved from, or has ended, is empty: its handle is NULL and its
 * destructor does nothing. Destructors throw nothing and drop the failures of what they end; end(), release(),
 * destroy() and close() throw them. So a program calls these where it wants to hear of a failure, as in the end of an
 * iteration, and leaves the rest to the destructors: of what an exception has left open, the innermost object ends
 * first.
 *
 * An object remembers handles, not addresses of other objects, so that those may be moved. What a closed manager or a
 * destroyed arena had is gone, and the destructors of objects that name it do nothing. What is acquired must be
 * released before the manager is closed; otherwise it stays open.
 *
 * Threads: as the C functions, any; one object is used by one thread at a time.
 */
#ifndef GEMINI_HPP
#define GEMINI_HPP

#include <gemini.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

/** libgemini for C++11. Since: 0.1 */
namespace gemini {

/** A call of the library that failed. what() is the text of gemini_error_text(). Since: 0.1 */
class error : public std::runtime_error {
public:
  /** Of the calling thread's last failed call.
   *  @param status  what that call returned */
  explicit error(gemini_status_t status)
      : std::runtime_error(text(status)), status_(status), native_code_(last(status).native_code) {}
  /** GEMINI_ERR_*. */
  gemini_status_t status() const noexcept { return status_; }
  /** errno or the device's code; 0 when there is none. */
  std::int64_t native_code() const noexcept { return native_code_; }

private:
  static gemini_error_info_t last(gemini_status_t status) {
    gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
    if (gemini_last_error(&info) != GEMINI_OK || info.status != status) info.native_code = 0, info.status = GEMINI_OK;
    return info;
  }
  static std::string text(gemini_status_t status) {
    return last(status).status == status ? gemini_error_text() : gemini_status_string(status);
  }
  gemini_status_t status_;
  std::int64_t native_code_;
};

/** Throws an error unless the status is GEMINI_OK. Since: 0.1 */
inline void check(gemini_status_t status) {
  if (status != GEMINI_OK) throw error(status);
}

/** Forgets a failure, as destructors do. Since: 0.1 */
inline void drop(gemini_status_t) noexcept {}

/** The calling thread in place of a stream: GEMINI_STREAM_CALLER. Since: 0.1 */
constexpr gemini_stream_t caller = nullptr;

/** What bytes are wanted for. Since: 0.1 */
enum class mode : std::uint32_t { read = GEMINI_READ, write = GEMINI_WRITE, read_write = GEMINI_READ_WRITE };
/** Where bytes are wanted. Since: 0.1 */
enum class tier : std::uint32_t { device = GEMINI_TIER_DEVICE, host = GEMINI_TIER_HOST, file = GEMINI_TIER_FILE };

/** A manager: gemini_manager_open(). Since: 0.1 */
class manager {
public:
  /** Opens a manager.
   *  @param config  borrowed until return
   *  @throws error  as gemini_manager_open() */
  explicit manager(const gemini_config_t &config) : mgr_(nullptr) { check(gemini_manager_open(&config, &mgr_)); }
  manager(manager &&other) noexcept : mgr_(other.mgr_) { other.mgr_ = nullptr; }
  manager &operator=(manager &&other) noexcept {
    if (this != &other) {
      drop(gemini_manager_close(mgr_));
      mgr_ = other.mgr_, other.mgr_ = nullptr;
    }
    return *this;
  }
  manager(const manager &) = delete;
  manager &operator=(const manager &) = delete;
  /** Closes the manager, if that is possible: gemini_manager_close(). */
  ~manager() { drop(gemini_manager_close(mgr_)); }

  /** The handle, which stays the object's; NULL: it is empty. */
  gemini_manager_t get() const noexcept { return mgr_; }
  /** Closes the manager: gemini_manager_close().
   *  @throws error  GEMINI_ERR_BUSY: something is acquired, and the manager stays open. Otherwise asynchronous work has
   *          failed before, and everything is freed */
  void close() {
    const gemini_status_t status = gemini_manager_close(mgr_);
    if (status != GEMINI_ERR_BUSY) mgr_ = nullptr;
    check(status);
  }
  /** gemini_budget_set(). */
  void budget_set(tier of, std::uint64_t bytes) {
    check(gemini_budget_set(mgr_, static_cast<std::uint32_t>(of), bytes));
  }
  /** gemini_update_wait(). */
  void update_wait() { check(gemini_update_wait(mgr_)); }
  /** gemini_stats(). */
  gemini_stats_t stats() const {
    gemini_stats_t stats = GEMINI_STATS_INIT;
    check(gemini_stats(mgr_, &stats));
    return stats;
  }
  /** gemini_tier_stats(). */
  gemini_tier_stats_t tier_stats(tier of) const {
    gemini_tier_stats_t stats = GEMINI_TIER_STATS_INIT;
    check(gemini_tier_stats(mgr_, static_cast<std::uint32_t>(of), &stats));
    return stats;
  }
  /** gemini_stats_text(). */
  std::string stats_text() const { return text(gemini_stats_text); }
  /** gemini_plan_explain(). */
  std::string explain() const { return text(gemini_plan_explain); }
  /** gemini_manager_dump(). */
  std::string dump() const { return text(gemini_manager_dump); }

private:
  std::string text(gemini_status_t (*write)(gemini_manager_t, std::uint64_t, char *, std::uint64_t *)) const {
    std::vector<char> room(4096);
    for (;;) {
      std::uint64_t length = 0;
      check(write(mgr_, room.size(), room.data(), &length));
      if (length < room.size()) return std::string(room.data(), static_cast<std::size_t>(length));
      room.resize(2 * static_cast<std::size_t>(length)); // it may have grown meanwhile
    }
  }
  gemini_manager_t mgr_;
};

/** For the classes below: a handle of a manager's, and the function that ends it. Since: 0.1 */
template <class Handle, gemini_status_t (*End)(gemini_manager_t, Handle)> class owned {
public:
  owned(owned &&other) noexcept : mgr_(other.mgr_), handle_(other.handle_) { other.handle_ = nullptr; }
  owned &operator=(owned &&other) noexcept {
    if (this != &other) {
      end();
      mgr_ = other.mgr_, handle_ = other.handle_, other.handle_ = nullptr;
    }
    return *this;
  }
  owned(const owned &) = delete;
  owned &operator=(const owned &) = delete;
  ~owned() { end(); }

  /** The handle, which stays the object's; NULL: it is empty. */
  Handle get() const noexcept { return handle_; }
  /** Ends what the handle names.
   *  @throws error  as the C function; then nothing has changed */
  void destroy() {
    if (handle_) check(End(mgr_, handle_));
    handle_ = nullptr;
  }

protected:
  /** Takes a handle over. */
  owned(gemini_manager_t mgr, Handle handle) noexcept : mgr_(mgr), handle_(handle) {}

private:
  void end() noexcept {
    if (handle_) drop(End(mgr_, handle_));
  }
  gemini_manager_t mgr_;
  Handle handle_;
};

/** An arena: gemini_arena_create(). Destroying it destroys its tensors. Since: 0.1 */
class arena : public owned<gemini_arena_t, gemini_arena_destroy> {
public:
  /** Reserves an arena.
   *  @param config  borrowed until return
   *  @throws error  as gemini_arena_create() */
  arena(const manager &mgr, const gemini_arena_config_t &config) : owned(mgr.get(), create(mgr, config)) {}

private:
  static gemini_arena_t create(const manager &mgr, const gemini_arena_config_t &config) {
    gemini_arena_t arena = nullptr;
    check(gemini_arena_create(mgr.get(), &config, &arena));
    return arena;
  }
};

/** A tensor: gemini_tensor_register(). Ending it forgets the name; its bytes stay in the arena. Since: 0.1 */
class tensor : public owned<gemini_tensor_t, gemini_tensor_unregister> {
public:
  /** Registers a tensor.
   *  @param name  unique in the manager; copied
   *  @param size_bytes  a multiple of the arena's element_bytes, not 0
   *  @param offset_bytes  in the arena; GEMINI_OFFSET_NEXT: the next free place
   *  @throws error  as gemini_tensor_register() */
  tensor(const manager &mgr, const arena &in, const std::string &name, std::uint64_t size_bytes,
         std::uint64_t offset_bytes = GEMINI_OFFSET_NEXT)
      : owned(mgr.get(), create(mgr, in, name, size_bytes, offset_bytes)) {}

private:
  static gemini_tensor_t create(const manager &mgr, const arena &in, const std::string &name, std::uint64_t size_bytes,
                                std::uint64_t offset_bytes) {
    gemini_tensor_t tensor = nullptr;
    check(gemini_tensor_register(mgr.get(), in.get(), name.c_str(), size_bytes, offset_bytes, &tensor));
    return tensor;
  }
};

/** The tensor of the same elements in an arena that follows: gemini_tensor_counterpart(). It needs no end.
 *  Since: 0.1 */
inline gemini_tensor_t counterpart(const manager &mgr, const tensor &of, const arena &in) {
  gemini_tensor_t tensor = nullptr;
  check(gemini_tensor_counterpart(mgr.get(), of.get(), in.get(), &tensor));
  return tensor;
}

/** A stream: gemini_stream_create(). Its end waits for its work. Since: 0.1 */
class stream : public owned<gemini_stream_t, gemini_stream_destroy> {
public:
  /** Creates a stream.
   *  @throws error  as gemini_stream_create() */
  explicit stream(const manager &mgr) : owned(mgr.get(), create(mgr)) {}
  /** Makes a CUDA stream of the caller's usable: gemini_stream_adopt().
   *  @param native  the cudaStream_t, which outlives the object; NULL: the default stream
   *  @throws error  as gemini_stream_adopt() */
  stream(const manager &mgr, void *native) : owned(mgr.get(), adopt(mgr, native)) {}

private:
  static gemini_stream_t create(const manager &mgr) {
    gemini_stream_t stream = nullptr;
    check(gemini_stream_create(mgr.get(), &stream));
    return stream;
  }
  static gemini_stream_t adopt(const manager &mgr, void *native) {
    gemini_stream_t stream = nullptr;
    check(gemini_stream_adopt(mgr.get(), native, &stream));
    return stream;
  }
};

/** Names a range of a tensor, for acquired and op: gemini_tensor_access(). Nothing is acquired.
 *  @param offset_bytes, size_bytes  in the tensor; 0 and 0: all of it
 *  Since: 0.1 */
inline gemini_access_t access(gemini_tensor_t of, mode wanted, tier where = tier::device,
                              std::uint64_t offset_bytes = 0, std::uint64_t size_bytes = 0) {
  return gemini_tensor_access(of, offset_bytes, size_bytes, static_cast<std::uint32_t>(wanted),
                              static_cast<std::uint32_t>(where));
}
/** Names a range of a tensor, likewise. Since: 0.1 */
inline gemini_access_t access(const tensor &of, mode wanted, tier where = tier::device, std::uint64_t offset_bytes = 0,
                              std::uint64_t size_bytes = 0) {
  return access(of.get(), wanted, where, offset_bytes, size_bytes);
}
/** Names a range of an arena, likewise: gemini_arena_access().
 *  @param size_bytes  0 with offset_bytes 0: what is used of it when it is acquired; an arena that may grow before the
 *           release needs the size
 *  Since: 0.1 */
inline gemini_access_t access(const arena &of, mode wanted, tier where = tier::device, std::uint64_t offset_bytes = 0,
                              std::uint64_t size_bytes = 0) {
  return gemini_arena_access(of.get(), offset_bytes, size_bytes, static_cast<std::uint32_t>(wanted),
                             static_cast<std::uint32_t>(where));
}
/** Names bytes by their device address, likewise: gemini_address_access(). Since: 0.1 */
inline gemini_access_t access_at(const void *address, std::uint64_t size_bytes, mode wanted,
                                 tier where = tier::device) {
  return gemini_address_access(address, size_bytes, static_cast<std::uint32_t>(wanted),
                               static_cast<std::uint32_t>(where));
}

/** Ranges that are acquired until its end, all or none: gemini_acquire(). Since: 0.1 */
class acquired {
public:
  /** Acquires ranges.
   *  @param uses  what access() returned
   *  @param on  a stream's handle: work queued there sees the bytes, and they are released behind the work queued there
   *           by then. caller: the calling thread; on the device, too, the call then waits for the bytes
   *  @throws error  as gemini_acquire(); nothing is acquired */
  acquired(const manager &mgr, std::vector<gemini_access_t> uses, gemini_stream_t on = caller)
      : mgr_(mgr.get()), uses_(std::move(uses)), stream_(on) {
    check(gemini_acquire(mgr_, uses_.data(), uses_.size(), stream_));
  }
  acquired(const manager &mgr, std::vector<gemini_access_t> uses, const stream &on)
      : acquired(mgr, std::move(uses), on.get()) {}
  acquired(acquired &&other) noexcept : mgr_(other.mgr_), uses_(std::move(other.uses_)), stream_(other.stream_) {
    other.uses_.clear();
  }
  acquired &operator=(acquired &&other) noexcept {
    if (this != &other) {
      end();
      mgr_ = other.mgr_, uses_ = std::move(other.uses_), stream_ = other.stream_;
      other.uses_.clear();
    }
    return *this;
  }
  acquired(const acquired &) = delete;
  acquired &operator=(const acquired &) = delete;
  ~acquired() { end(); }

  /** The first byte of a range, by its place in the list; valid until the release.
   *  @throws std::out_of_range  there is no such range, or they are released */
  template <class T> T *as(std::size_t number) const { return static_cast<T *>(uses_.at(number).ptr); }
  /** How many ranges there are; 0 after the release. */
  std::size_t size() const noexcept { return uses_.size(); }
  /** Releases the ranges: gemini_release().
   *  @throws error  as gemini_release(); then nothing is released */
  void release() {
    if (!uses_.empty()) check(gemini_release(mgr_, uses_.data(), uses_.size(), stream_));
    uses_.clear();
  }

private:
  void end() noexcept {
    if (!uses_.empty()) drop(gemini_release(mgr_, uses_.data(), uses_.size(), stream_));
  }
  gemini_manager_t mgr_;
  std::vector<gemini_access_t> uses_;
  gemini_stream_t stream_;
};

/** A pass of the program's loop, from its construction to its end: gemini_iteration_begin_with(). Since: 0.1 */
class iteration {
public:
  /** Begins an iteration.
   *  @param label  of which sort it is
   *  @throws error  GEMINI_ERR_STATE: one is open */
  explicit iteration(const manager &mgr, std::uint64_t label = 0) : mgr_(mgr.get()) {
    check(gemini_iteration_begin_with(mgr_, label));
  }
  iteration(iteration &&other) noexcept : mgr_(other.mgr_) { other.mgr_ = nullptr; }
  iteration &operator=(iteration &&) = delete;
  iteration(const iteration &) = delete;
  iteration &operator=(const iteration &) = delete;
  ~iteration() {
    if (mgr_) drop(gemini_iteration_end(mgr_));
  }
  /** Says which phase begins: gemini_phase_set().
   *  @param number  GEMINI_PHASE_* */
  void phase(std::uint32_t number) { check(gemini_phase_set(mgr_, number)); }
  /** Ends the iteration: gemini_iteration_end().
   *  @throws error  GEMINI_ERR_STATE: an operator is open, and so stays the iteration. Otherwise it has ended, for
   *          example without a plan (GEMINI_ERR_OOM_DEVICE) */
  void end() {
    const gemini_status_t status = mgr_ ? gemini_iteration_end(mgr_) : GEMINI_OK;
    if (status != GEMINI_ERR_STATE) mgr_ = nullptr;
    check(status);
  }

private:
  gemini_manager_t mgr_;
};

/** An operator with the ranges that it uses, from its construction to its end: gemini_op_begin_with(). Since: 0.1 */
class op {
public:
  /** Opens an operator and acquires what it uses.
   *  @param name  1 to 127 bytes, the same in each iteration
   *  @param on  the handle of the stream that its work is queued on, or caller
   *  @param uses  what access() returned
   *  @throws error  as gemini_op_begin_with(); the operator is not open and nothing is acquired */
  op(const manager &mgr, const std::string &name, gemini_stream_t on, std::vector<gemini_access_t> uses = {})
      : mgr_(mgr.get()), uses_(std::move(uses)) {
    check(gemini_op_begin_with(mgr_, name.c_str(), on, uses_.data(), uses_.size()));
  }
  op(const manager &mgr, const std::string &name, const stream &on, std::vector<gemini_access_t> uses = {})
      : op(mgr, name, on.get(), std::move(uses)) {}
  op(op &&other) noexcept : mgr_(other.mgr_), uses_(std::move(other.uses_)) { other.mgr_ = nullptr; }
  op &operator=(op &&) = delete;
  op(const op &) = delete;
  op &operator=(const op &) = delete;
  ~op() {
    if (mgr_) drop(gemini_op_end(mgr_));
  }
  /** The first byte of a range, by its place in the list; valid until the end.
   *  @throws std::out_of_range  there is no such range */
  template <class T> T *as(std::size_t number) const { return static_cast<T *>(uses_.at(number).ptr); }
  /** Releases the ranges, behind the work queued on the stream so far, and closes the operator: gemini_op_end().
   *  @throws error  as gemini_op_end(); then it stays open */
  void end() {
    if (mgr_) check(gemini_op_end(mgr_));
    mgr_ = nullptr;
    uses_.clear();
  }

private:
  gemini_manager_t mgr_;
  std::vector<gemini_access_t> uses_;
};

/** Device memory that is no model data, until its end: gemini_alloc(). Since: 0.1 */
class memory {
public:
  /** Allocates memory, for which chunks leave the device. Its bytes are undefined.
   *  @param on  the handle of the stream whose work uses it; it is freed behind the work queued there by then
   *  @throws error  as gemini_alloc() */
  memory(const manager &mgr, std::uint64_t size_bytes, gemini_stream_t on = caller)
      : mgr_(mgr.get()), data_(nullptr), stream_(on) {
    check(gemini_alloc(mgr_, size_bytes, stream_, &data_));
  }
  memory(const manager &mgr, std::uint64_t size_bytes, const stream &on) : memory(mgr, size_bytes, on.get()) {}
  memory(memory &&other) noexcept : mgr_(other.mgr_), data_(other.data_), stream_(other.stream_) {
    other.data_ = nullptr;
  }
  memory &operator=(memory &&other) noexcept {
    if (this != &other) {
      end();
      mgr_ = other.mgr_, data_ = other.data_, stream_ = other.stream_, other.data_ = nullptr;
    }
    return *this;
  }
  memory(const memory &) = delete;
  memory &operator=(const memory &) = delete;
  ~memory() { end(); }
  /** Its first byte; NULL: it is empty. */
  void *data() const noexcept { return data_; }

private:
  void end() noexcept {
    if (data_) drop(gemini_free(mgr_, data_, stream_));
  }
  gemini_manager_t mgr_;
  void *data_;
  gemini_stream_t stream_;
};

} // namespace gemini
#endif

/* Streams as users see them: gemini_stream_create(), _adopt(), _native(), _destroy(), _call(), _synchronize().
 * core/streams.c does the work; these functions check arguments and the uses of a stream by ops and graphs.
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/streams.h"
#include "chunk/graph.h"
#include "core/manager.h"
#include "tracer/tracer.h"

static gemini_status_t stream_create(gmi_manager_t *m, void *const *native, gemini_stream_t *stream_out) {
  if (!stream_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "stream_out is NULL");
  gmi_lock_beside(m, "gemini_stream_create");
  uint32_t index = GMI_DEVICE_MAX_STREAMS;
  gemini_status_t status = GEMINI_OK;
  if (native) /* a stream that a hook has adopted becomes the caller's: one native stream has one index */
    for (index = 0; index < GMI_DEVICE_MAX_STREAMS; index++)
      if (m->streams[index].hooked && gmi_stream_is_native(&m->streams[index], *native)) break;
  if (index == GMI_DEVICE_MAX_STREAMS) status = gmi_stream_open(m, GMI_STREAM_CALLERS, native, &index);
  else m->streams[index].hooked = false;
  if (!status) *stream_out = gmi_handle(m, GMI_HANDLE_STREAM, m->streams[index].generation, index);
  gmi_unlock(m);
  return status;
}

gemini_status_t gemini_stream_create(gemini_manager_t mgr, gemini_stream_t *stream_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? stream_create(m, NULL, stream_out) : GEMINI_ERR_HANDLE);
}

gemini_status_t gemini_stream_adopt(gemini_manager_t mgr, void *native, gemini_stream_t *stream_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? stream_create(m, &native, stream_out) : GEMINI_ERR_HANDLE);
}

static gemini_status_t stream_native(gmi_manager_t *m, gemini_stream_t stream, void **native_out) {
  uint32_t index;
  if (!native_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "native_out is NULL");
  gmi_lock_beside(m, "gemini_stream_native");
  gemini_status_t status = gmi_stream_resolve(m, stream, &index);
  if (!status && index == GMI_CALLER)
    status = gmi_fail(GEMINI_ERR_INVALID, 0, "GEMINI_STREAM_CALLER is the calling thread, not a stream of the device");
  void *native;
  if (!status) status = m->device.ops->stream.native(m->device.self, index, &native);
  if (status == GEMINI_ERR_UNSUPPORTED) gmi_fail(status, 0, "device %s has no native streams", m->device.ops->name);
  if (!status) {
    m->streams[index].native = *native_out = native;
    m->streams[index].named = true;
  }
  gmi_unlock(m);
  return status;
}

gemini_status_t gemini_stream_native(gemini_manager_t mgr, gemini_stream_t stream, void **native_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? stream_native(m, stream, native_out) : GEMINI_ERR_HANDLE);
}

static gemini_status_t stream_destroy(gmi_manager_t *m, gemini_stream_t stream) {
  if (!stream) return GEMINI_OK;
  gmi_lock(m, "gemini_stream_destroy");
  uint32_t index;
  gemini_status_t status = gmi_stream_resolve(m, stream, &index);
  if (!status && m->streams[index].internal)
    status = gmi_fail(GEMINI_ERR_HANDLE, 0, "%#llx is one of the library's own streams: callers cannot destroy it",
                      (unsigned long long)stream);
  if (!status && gmi_tracer_op_stream(m) == index)
    status = gmi_fail(GEMINI_ERR_BUSY, 0, "the open operator runs on this stream");
  if (!status && gmi_graph_uses_stream(m, index))
    status =
        gmi_fail(GEMINI_ERR_BUSY, 0, "a graph was begun on this stream and not ended, or entered on it and not left");
  if (!status) status = gmi_stream_end(m, index);
  gmi_unlock(m);
  return status;
}

gemini_status_t gemini_stream_destroy(gemini_manager_t mgr, gemini_stream_t stream) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? stream_destroy(m, stream) : GEMINI_ERR_HANDLE);
}

static gemini_status_t stream_call(gmi_manager_t *m, gemini_stream_t stream, gemini_call_fn fn, void *user) {
  uint32_t index = 0;
  if (!fn) return gmi_fail(GEMINI_ERR_INVALID, 0, "fn is NULL");
  gemini_status_t status = gmi_stream_enter(m, stream, &index);
  if (status) return status;
  if (index == GMI_CALLER) {
    fn(user);
    return GEMINI_OK;
  }
  status = m->device.ops->queue.call(m->device.self, index, fn, user);
  gmi_stream_leave(m, index);
  return status ? gmi_fail_device(status, "the device could not queue the call") : GEMINI_OK;
}

gemini_status_t gemini_stream_call(gemini_manager_t mgr, gemini_stream_t stream, gemini_call_fn fn, void *user) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? stream_call(m, stream, fn, user) : GEMINI_ERR_HANDLE);
}

static gemini_status_t stream_synchronize(gmi_manager_t *m, gemini_stream_t stream) {
  uint32_t index = 0;
  if (stream == GEMINI_STREAM_CALLER) return GEMINI_OK;
  gmi_lock_beside(m, "gemini_stream_synchronize");
  gmi_fence_t end = 0;
  gemini_status_t status = gmi_stream_resolve(m, stream, &index);
  if (!status) status = gmi_fence_now_untimed(m, index, &end);
  if (!status) status = gmi_stream_enter(m, stream, &index); /* last under the lock: gmi_stream_end() waits with it */
  gmi_unlock(m);
  if (status) return status;
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, "gemini_stream_synchronize", GMI_WAIT_STREAM, index);
  /* without the lock, so that other threads continue */
  status = m->device.ops->stream.sync(m->device.self, index, gmi_fence_mark(end));
  gmi_wait_end(m, &wait);
  gmi_stream_leave(m, index);
  if (status != GEMINI_ERR_PEER) return status;
  gmi_lock_beside(m, "gemini_stream_synchronize");
  (void)m->groups.failure(m); /* the same status, and the rank's name */
  gmi_unlock(m);
  return status;
}

gemini_status_t gemini_stream_synchronize(gemini_manager_t mgr, gemini_stream_t stream) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? stream_synchronize(m, stream) : GEMINI_ERR_HANDLE);
}

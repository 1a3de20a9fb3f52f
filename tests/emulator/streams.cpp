// Streams, events and graphs of the emulated CUDA runtime. Work runs when it is enqueued, but for that of a stream that
// is being captured, which is recorded. A capture is checked as the real runtime does: streams join it by waiting for
// an event that was recorded in it, and must be waited for before it ends.
#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "emulator/runtime.h"

namespace {

using Clock = std::chrono::steady_clock;

// For each stream of a capture, how much of its work is known to be done.
using Progress = std::map<const CUstream_st*, size_t>;

void advance(Progress& progress, const Progress& other) {
  for (const auto& [stream, done] : other) progress[stream] = std::max(progress[stream], done);
}

struct Capture {
  cudaStream_t origin = nullptr;
  std::vector<cudaStream_t> streams;
  std::vector<std::function<void()>> work;
  bool active = true, valid = true;
};

}  // namespace

struct CUstream_st {
  std::shared_ptr<Capture> capture;
  Progress progress;
};

struct CUevent_st {
  bool timed = true;
  std::optional<Clock::time_point> time;  // of the last record outside of a capture
  std::shared_ptr<Capture> capture;       // of the last record, if it was in one
  Progress progress;
};

struct CUgraph_st {
  std::vector<std::function<void()>> work;
};

struct CUgraphExec_st {
  std::vector<std::function<void()>> work;
};

namespace furious::emulator {
namespace {

// Handles that exist, so that the use of a destroyed one is an error.
std::unordered_set<const void*>& handles() {
  static auto& all = *new std::unordered_set<const void*>;
  return all;
}

template <class T>
T* created(T* handle) {
  handles().insert(handle);
  return handle;
}

template <class T>
T& existing(T* handle, const char* what) {
  if (!handles().contains(handle))
    throw Failure(cudaErrorInvalidResourceHandle, std::string(what) + " that does not exist");
  return *handle;
}

template <class T>
void destroy(T* handle, const char* what) {
  delete &existing(handle, what);
  handles().erase(handle);
}

CUstream_st& stream_of(cudaStream_t handle) {
  static auto& standard = *new CUstream_st;
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) return standard;
  return existing(handle, "a stream");
}

// Waiting for work that is only recorded would never end.
void not_while_capturing(CUstream_st& stream) {
  if (stream.capture == nullptr) return;
  stream.capture->valid = false;
  throw Failure(cudaErrorStreamCaptureUnsupported, "waiting for a stream that is being captured");
}

void check_recorded_outside(const CUevent_st& event) {
  if (event.capture != nullptr) throw Failure(cudaErrorCapturedEvent, "its time is not known");
}

// Returns whether the stream is being captured.
bool record(CUstream_st& stream, std::function<void()>& work) {
  if (stream.capture == nullptr) return false;
  if (!stream.capture->valid) throw Failure(cudaErrorStreamCaptureInvalidated, "work for a stream");
  stream.capture->work.push_back(std::move(work));
  ++stream.progress[&stream];
  return true;
}

void record_event(CUevent_st& event, cudaStream_t handle, bool external) {
  CUstream_st& stream = stream_of(handle);
  if (external) {
    enqueue(handle, [recorded = &event] {
      CUevent_st& again = existing(recorded, "an event");  // which may have been destroyed since
      again.time = Clock::now();
      again.capture = nullptr;
    });
    return;
  }
  event.capture = stream.capture;
  event.progress = stream.progress;
  if (stream.capture == nullptr) event.time = Clock::now();
}

void wait(CUstream_st& stream, const CUevent_st& event) {
  if (event.capture == nullptr) {
    if (stream.capture != nullptr && event.time.has_value()) {
      stream.capture->valid = false;
      throw Failure(cudaErrorStreamCaptureIsolation, "a captured stream waits for work outside of the capture");
    }
    return;
  }
  if (stream.capture == nullptr) {
    if (!event.capture->active) throw Failure(cudaErrorCapturedEvent, "the capture has ended");
    stream.capture = event.capture;
    stream.capture->streams.push_back(&stream);
  }
  if (stream.capture != event.capture) {
    stream.capture->valid = event.capture->valid = false;
    throw Failure(cudaErrorStreamCaptureMerge, "a captured stream waits for work of another capture");
  }
  advance(stream.progress, event.progress);
}

thread_local int captures = 0;  // that this thread has begun

void begin_capture(cudaStream_t handle) {
  CUstream_st& stream = stream_of(handle);
  if (&stream != handle) throw Failure(cudaErrorStreamCaptureUnsupported, "the default stream cannot be captured");
  if (stream.capture != nullptr) throw Failure(cudaErrorIllegalState, "the stream is being captured");
  stream.capture = std::make_shared<Capture>();
  stream.capture->origin = handle;
  stream.capture->streams = {handle};
  ++captures;
}

CUgraph_st* end_capture(cudaStream_t handle) {
  CUstream_st& stream = stream_of(handle);
  const std::shared_ptr<Capture> capture = stream.capture;
  if (capture == nullptr) throw Failure(cudaErrorIllegalState, "the stream is not being captured");
  if (capture->origin != handle) throw Failure(cudaErrorStreamCaptureUnmatched, "it began on another stream");
  Progress all;
  for (const cudaStream_t joined : capture->streams) advance(all, joined->progress);
  const Progress known = stream.progress;
  for (const cudaStream_t joined : capture->streams) {
    joined->capture = nullptr;
    joined->progress.clear();
  }
  capture->active = false;
  --captures;
  if (!capture->valid) throw Failure(cudaErrorStreamCaptureInvalidated, "the graph is not complete");
  for (const auto& [joined, done] : all) {
    const auto found = known.find(joined);
    if (done > 0 && (found == known.end() || found->second < done))
      throw Failure(cudaErrorStreamCaptureUnjoined, "a stream that joined the capture is not waited for");
  }
  return created(new CUgraph_st{std::move(capture->work)});
}

void leave_capture(CUstream_st& stream) {
  if (stream.capture == nullptr) return;
  stream.capture->valid = false;
  std::erase(stream.capture->streams, &stream);
}

}  // namespace

bool is_capturing() {
  return captures > 0;
}

void enqueue(cudaStream_t handle, std::function<void()> work) {
  if (!record(stream_of(handle), work)) work();
}

}  // namespace furious::emulator

using namespace furious::emulator;

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return call([&] { *stream = created(new CUstream_st); });
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return call([&] {
    leave_capture(existing(stream, "a stream"));
    destroy(stream, "a stream");
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return call([&] { not_while_capturing(stream_of(stream)); });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return call([&] { wait(stream_of(stream), existing(event, "an event")); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return call([&] {
    *event = created(new CUevent_st);
    (*event)->timed = (flags & cudaEventDisableTiming) == 0;
  });
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return call([&] { destroy(event, "an event"); });
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return call([&] { record_event(existing(event, "an event"), stream, (flags & cudaEventRecordExternal) != 0); });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return call([&] { check_recorded_outside(existing(event, "an event")); });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  return call([&] {
    for (const cudaEvent_t handle : {from, to}) {
      const CUevent_st& event = existing(handle, "an event");
      check_recorded_outside(event);
      if (!event.timed || !event.time.has_value())
        throw Failure(cudaErrorInvalidResourceHandle, "an event that has no time");
    }
    *milliseconds = std::chrono::duration<float, std::milli>(*to->time - *from->time).count();
  });
}

// In a graph it is called with the mutex locked, otherwise without: it may wait for another thread.
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  bool recorded = false;
  const cudaError_t status = call([&] {
    std::function<void()> work = [=] { function(argument); };
    recorded = record(stream_of(stream), work);
  });
  if (status == cudaSuccess && !recorded) function(argument);
  return status;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  return call([&] { begin_capture(stream); });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return call([&] {
    const auto& capture = stream_of(stream).capture;
    *status = capture == nullptr ? cudaStreamCaptureStatusNone
              : capture->valid   ? cudaStreamCaptureStatusActive
                                 : cudaStreamCaptureStatusInvalidated;
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  return call([&] { *graph = end_capture(stream); });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  return call([&] { *exec = created(new CUgraphExec_st{existing(graph, "a graph").work}); });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return call([&] { destroy(graph, "a graph"); });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  return call([&] { destroy(exec, "a graph"); });
}

// Locked as a whole: the work of another thread comes before or after it.
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  return call([&] {
    for (const auto& work : existing(exec, "a graph").work) enqueue(stream, work);
  });
}

}  // extern "C"

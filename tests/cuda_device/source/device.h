// Devices, streams and their memory, as the other files of this folder see them.
//
// Locks: that of the allocators is taken before that of the streams; neither is held while a kernel
// or Python runs.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>

namespace cuda_device {

constexpr int MAX_DEVICES = 16;
constexpr int STREAMS = 33;  // of a device: its default stream and the pool that new ones come from

using Work = std::function<void()>;

// How far a stream has come: all work up to number `seq`.
struct Mark {
  int device = 0;
  int64_t stream = 0;
  uint64_t seq = 0;
};

// When a stream runs what it is given.
enum class Lag : int {
  NONE = 0,    // at once
  RANDOM = 1,  // a quarter of the work late, by a random time
  HELD = 2,    // only when somebody waits for it
};

// -- devices (guard.cpp) --------------------------------------------------------------------------

inline c10::Stream stream_of(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, c10::DeviceIndex(device)), id);
}

int device_count();
int current_device();
c10::Stream current_stream(int device);
bool was_used();  // a device has a context in this process

// Tells Python that the host waits, and acts as `torch.cuda.set_sync_debug_mode` says.
void host_waits(const char* why, bool torch_warns);

// -- streams (streams.cpp) ------------------------------------------------------------------------

c10::Stream new_stream(int device);
Mark mark(const c10::Stream& stream);
bool is_done(const Mark& mark);
// Whether it is done, for one that asks again and again: a held stream then goes on.
bool poll(const Mark& mark);
void wait(const Mark& mark);
void wait_device(int device);
// Later work of the stream runs after the mark.
void order(const c10::Stream& stream, const Mark& mark);
// Whether work would run at once.
bool is_prompt(const c10::Stream& stream);
// In the calling thread, if the stream is prompt, else by its worker.
Mark submit(const c10::Stream& stream, Work work);
// By the worker; the host goes on.
Mark enqueue(const c10::Stream& stream, Work work);
// In the calling thread, after all earlier work of the stream.
void run_here(const c10::Stream& stream, const Work& work);
bool is_poisoning();

// -- memory (memory.cpp, pinned.cpp) ---------------------------------------------------------------

c10::Allocator* device_allocator();
void record_stream(const c10::DataPtr& pointer, const c10::Stream& stream);
std::pair<size_t, size_t> free_and_total(int device);
bool is_pinned(const void* pointer);
c10::Allocator* pinned_allocator();
// Memory of the pinned allocator is not handed out again before the stream has come so far.
void record_pinned(const void* pointer, const c10::Stream& stream);

}  // namespace cuda_device

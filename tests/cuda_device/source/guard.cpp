// How torch reaches the devices: device guard, CUDA hooks, random numbers.
#include "device.h"

#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>

namespace cuda_device {
namespace {

std::atomic<int> count{-1};  // -1: Python has not said it yet
std::atomic<bool> used{false};
std::atomic<int> sync_debug_mode{0};
std::atomic<void (*)()> configure{nullptr};
std::atomic<void (*)(const char*)> tell_waits{nullptr};
thread_local int current = 0;
thread_local int64_t streams[MAX_DEVICES] = {};

int indexed(const c10::Device& device) { return device.has_index() ? device.index() : current; }

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What an event was recorded as: a mark, and when the stream came there. Shared with the stream,
// which may come there after the event is gone.
struct Recorded {
  Mark mark;
  std::shared_ptr<std::atomic<double>> at_ms = std::make_shared<std::atomic<double>>(0.0);
};

}  // namespace

// Negative if one of them has not come.
extern "C" double cuda_device_elapsed_ms(void* first, void* second) {
  if (first == nullptr || second == nullptr) return -1.0;
  const double one = *static_cast<Recorded*>(first)->at_ms, other = *static_cast<Recorded*>(second)->at_ms;
  return one == 0.0 || other == 0.0 ? -1.0 : other - one;
}

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const int before = current;
    setDevice(device);
    return {c10::kCUDA, c10::DeviceIndex(before)};
  }
  c10::Device getDevice() const override { return {c10::kCUDA, c10::DeviceIndex(current)}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(
        device.index() < device_count(),
        "CUDA error: invalid device ordinal: ", int(device.index()), " of ", device_count());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return current_stream(indexed(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(indexed(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(indexed(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(indexed(device)); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current_stream(stream.device_index());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id() == 0 ? 0 : stream.device_index() * STREAMS + stream.id());
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Recorded*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    if (*event == nullptr) *event = new Recorded;
    Recorded* const recorded = static_cast<Recorded*>(*event);
    recorded->at_ms = std::make_shared<std::atomic<double>>(0.0);
    recorded->mark = submit(stream, [at_ms = recorded->at_ms] { *at_ms = now_ms(); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) order(stream, static_cast<Recorded*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || poll(static_cast<Recorded*>(event)->mark);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(device_count()); }
  bool queryStream(const c10::Stream& stream) const override { return poll(mark(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits("stream", true);
    wait(mark(stream));
  }
  void synchronizeEvent(void* event) const override {
    host_waits("event", false);
    if (event != nullptr) wait(static_cast<Recorded*>(event)->mark);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    host_waits("device", false);
    wait_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    record_stream(pointer, stream);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const double passed = cuda_device_elapsed_ms(first, second);
    TORCH_CHECK(passed >= 0.0, "Both events must be completed before calculating elapsed time.");
    return passed;
  }
};

// Seed and offset, as CUDA's: work draws from a generator of its own, made of both when it is
// given to the stream, so that how late the stream is does not matter.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(int device)
      : GeneratorImpl(c10::Device(c10::kCUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(), "RNG state is wrong size");
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(state.mutable_data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  DeviceGenerator* clone_impl() const override {
    auto* const other = new DeviceGenerator(device_.index());
    other->seed_ = seed_, other->offset_ = offset_;
    return other;
  }
  uint64_t next() {
    const std::lock_guard<std::mutex> lock(mutex_);
    offset_ += 4;
    return seed_ ^ (offset_ * 0x9E3779B97F4A7C15ULL);
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

at::Generator& default_generator(int device) {
  static auto* const all = new std::vector<at::Generator>(MAX_DEVICES);
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  at::Generator& found = (*all)[device];
  if (!found.defined()) found = at::make_generator<DeviceGenerator>(device);
  return found;
}

std::atomic<bool> give_defaults{false};

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override { used = true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasCUDA() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return used; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(device_count()); }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current); }
  c10::DeviceIndex current_device() const override { return c10::DeviceIndex(current); }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({c10::kCUDA, device}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    if (device < 0) return -1;
    return Guard().exchangeDevice({c10::kCUDA, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(c10::DeviceIndex device) const override { Guard().synchronizeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    const int index = device < 0 ? current : device;
    return give_defaults ? default_generator(index) : at::make_generator<DeviceGenerator>(index);
  }
};

std::atomic<bool> in_bad_fork{false};
std::atomic<bool> watches_forks{false};

}  // namespace

int device_count() {
  if (count < 0) {
    if (void (*const ask)() = configure) ask();
  }
  return std::max(0, count.load());
}

int current_device() { return current; }

c10::Stream current_stream(int device) { return stream_of(device, streams[device]); }

bool was_used() { return used; }

void host_waits(const char* why, bool torch_warns) {
  if (void (*const tell)(const char*) = tell_waits) tell(why);
  if (!torch_warns || sync_debug_mode == 0) return;
  TORCH_CHECK(sync_debug_mode != 2, "called a synchronizing CUDA operation");
  TORCH_WARN("called a synchronizing CUDA operation");
}

uint64_t next_seed(const at::Generator& generator, int device) {
  const at::Generator& one = generator.defined() ? generator : default_generator(device);
  TORCH_CHECK(
      one.device().is_cuda(), "Expected a 'cuda' device type for generator but found '", one.device().type(), "'");
  return static_cast<DeviceGenerator*>(one.unsafeGetGeneratorImpl())->next();
}

extern "C" {

void cuda_device_set_callbacks(void (*ask)(), void (*tell)(const char*)) {
  configure = ask;
  tell_waits = tell;
}

void cuda_device_set_count(int number) { count = std::min(number, MAX_DEVICES); }

// The driver is opened: processes that are forked from here on cannot use it.
void cuda_device_poison_fork() {
  if (!watches_forks.exchange(true)) pthread_atfork(nullptr, nullptr, [] { in_bad_fork = true; });
}

int cuda_device_is_in_bad_fork() { return in_bad_fork; }

void cuda_device_init() { used = true; }

void cuda_device_give_default_generators(int given) { give_defaults = given != 0; }

void cuda_device_set_sync_debug_mode(int mode) { sync_debug_mode = mode; }

int cuda_device_sync_debug_mode() { return sync_debug_mode; }

int cuda_device_current() { return current; }

int cuda_device_exchange(int device) {
  if (device < 0) return -1;
  return Guard().exchangeDevice({c10::kCUDA, c10::DeviceIndex(device)}).index();
}

void cuda_device_set_stream(int device, int64_t id) { streams[device] = id; }

int64_t cuda_device_stream(int device) { return streams[device]; }

}  // extern "C"

}  // namespace cuda_device

namespace {
using cuda_device::Guard;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}  // namespace

namespace at {
using cuda_device::CUDAHooks;  // torch looks for it by this name
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

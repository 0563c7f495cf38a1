// Pinned memory of the host: torch's caching allocator for it, and memory that was registered.
#include "device.h"

#include <ATen/core/CachingHostAllocator.h>

#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace cuda_device {
namespace {

struct Pinned {
  void* pointer;
  size_t size;  // a power of two
  std::set<std::pair<int, int64_t>> uses;
  std::vector<Mark> marks;
};

class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::kCPU};
    std::unique_lock<std::mutex> lock(mutex_);
    free_done();
    const size_t size = std::bit_ceil(bytes);
    Pinned* block;
    auto& cached = free_[size];
    if (cached.empty()) {
      block = new Pinned{std::aligned_alloc(4096, std::max<size_t>(size, 4096)), size, {}, {}};
      ++stats_.num_host_alloc;
      stats_.allocations.increase(1);
      stats_.allocated_bytes.increase(size);
    } else {
      block = cached.back();
      cached.pop_back();
    }
    if (is_poisoning()) std::memset(block->pointer, 0xFF, size);
    stats_.active_requests.increase(1);
    stats_.active_bytes.increase(size);
    live_[block->pointer] = block;
    return {block->pointer, block->pointer, &release, c10::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  bool record_event(void* pointer, void*, c10::Stream stream) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = at(live_, pointer);
    if (found == live_.end()) return false;
    found->second->uses.emplace(stream.device_index(), stream.id());
    return true;
  }

  void empty_cache() override {
    for (int device = 0; device < device_count(); ++device) wait_device(device);
    std::unique_lock<std::mutex> lock(mutex_);
    free_done();
    for (auto& [size, blocks] : free_) {
      for (Pinned* const block : blocks) {
        std::free(block->pointer);
        delete block;
        ++stats_.num_host_free;
        stats_.allocations.decrease(1);
        stats_.allocated_bytes.decrease(size);
      }
    }
    free_.clear();
  }

  at::HostStats get_stats() override {
    std::unique_lock<std::mutex> lock(mutex_);
    return stats_;
  }

  void reset_accumulated_stats() override {
    for (auto* const stat : all()) stat->reset_accumulated();
  }

  void reset_peak_stats() override {
    for (auto* const stat : all()) stat->reset_peak();
  }

  bool holds(const void* pointer) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto registered = at(registered_, pointer);
    return at(live_, pointer) != live_.end() || registered != registered_.end();
  }

  // The codes are those of the CUDA runtime.
  int add(void* pointer, size_t size) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (pointer == nullptr || size == 0) return 1;
    return registered_.emplace(pointer, Pinned{pointer, size, {}, {}}).second ? 0 : 712;
  }

  int remove(void* pointer) {
    std::unique_lock<std::mutex> lock(mutex_);
    return registered_.erase(pointer) ? 0 : 713;
  }

  size_t registered_bytes() {
    std::unique_lock<std::mutex> lock(mutex_);
    size_t sum = 0;
    for (const auto& [pointer, block] : registered_) sum += block.size;
    return sum;
  }

 private:
  static void release(void* pointer);
  static size_t size_of(const Pinned* block) { return block->size; }
  static size_t size_of(const Pinned& block) { return block.size; }

  // The block that has the address.
  template <typename Blocks>
  static typename Blocks::iterator at(Blocks& blocks, const void* pointer) {
    auto found = blocks.upper_bound(const_cast<void*>(pointer));
    if (found == blocks.begin()) return blocks.end();
    --found;
    const char* const end = static_cast<char*>(found->first) + size_of(found->second);
    return static_cast<const char*>(pointer) < end ? found : blocks.end();
  }

  std::vector<c10::CachingAllocator::Stat*> all() {
    return {&stats_.active_requests, &stats_.active_bytes, &stats_.allocations, &stats_.allocated_bytes};
  }

  void give(void* pointer) {
    if (pointer == nullptr) return;
    std::unique_lock<std::mutex> lock(mutex_);
    Pinned* const block = live_.at(pointer);
    live_.erase(pointer);
    stats_.active_requests.decrease(1);
    stats_.active_bytes.decrease(block->size);
    for (const auto& [device, stream] : block->uses) {
      block->marks.push_back(mark(stream_of(device, stream)));
    }
    block->uses.clear();
    pending_.push_back(block);
  }

  void free_done() {
    std::vector<Pinned*> kept;
    for (Pinned* const block : pending_) {
      bool done = true;
      for (const Mark& mark : block->marks) done = done && is_done(mark);
      if (done) block->marks.clear();
      (done ? free_[block->size] : kept).push_back(block);
    }
    pending_ = std::move(kept);
  }

  std::mutex mutex_;
  std::map<void*, Pinned*> live_;
  std::map<void*, Pinned> registered_;
  std::map<size_t, std::vector<Pinned*>> free_;
  std::vector<Pinned*> pending_;
  at::HostStats stats_;
};

PinnedMemory& pinned() {
  static PinnedMemory* const one = new PinnedMemory;
  return *one;
}

void PinnedMemory::release(void* pointer) { pinned().give(pointer); }

const bool registered = (at::setHostAllocator(c10::kCUDA, &pinned(), 1), true);

}  // namespace

bool is_pinned(const void* pointer) { return pointer != nullptr && pinned().holds(pointer); }

c10::Allocator* pinned_allocator() { return &pinned(); }

void record_pinned(const void* pointer, const c10::Stream& stream) {
  pinned().record_event(const_cast<void*>(pointer), nullptr, stream);
}

extern "C" {

int cuda_device_register(void* pointer, size_t size) { return pinned().add(pointer, size); }

int cuda_device_unregister(void* pointer) { return pinned().remove(pointer); }

size_t cuda_device_registered_bytes() { return pinned().registered_bytes(); }

void cuda_device_host_stats(int64_t* into) {
  const at::HostStats stats = pinned().get_stats();
  for (const auto* stat :
       {&stats.active_requests, &stats.active_bytes, &stats.allocations, &stats.allocated_bytes}) {
    for (const int64_t value : {stat->current, stat->peak, stat->allocated, stat->freed}) *into++ = value;
  }
  *into++ = stats.num_host_alloc;
  *into++ = stats.num_host_free;
}

void cuda_device_reset_host_stats(int peak) {
  if (peak) {
    pinned().reset_peak_stats();
  } else {
    pinned().reset_accumulated_stats();
  }
}

void cuda_device_empty_host_cache() { pinned().empty_cache(); }

}  // extern "C"
}  // namespace cuda_device

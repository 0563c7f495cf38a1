// Memory of devices: the caching allocator of CUDA in torch, with its segments, pools and counters.
#include "device.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>

#include <cstring>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>
#include <vector>

namespace cuda_device {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t KIB = 1024, MIB = 1024 * KIB, GIB = 1024 * MIB;
// The sizes are those of torch.
constexpr size_t ROUND = 512, SMALL = MIB, SMALL_SEGMENT = 2 * MIB, LARGE_SEGMENT = 20 * MIB,
                 MIN_OWN_SEGMENT = 10 * MIB, ROUND_SEGMENT = 2 * MIB;

struct Block {
  char* pointer;
  size_t size, requested = 0;
  int device;
  int64_t stream;
  bool is_small, allocated = false;
  Block *previous = nullptr, *next = nullptr;  // in the same segment
  std::set<int64_t> uses;                      // streams that were recorded

  bool is_split() const { return previous != nullptr || next != nullptr; }
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->stream, a->size, a->pointer) < std::tie(b->stream, b->size, b->pointer);
  }
};

struct Pending {  // a freed block that recorded streams still use
  Block* block;
  std::vector<Mark> marks;
};

struct Memory {
  size_t total = 0, context = 0, others = 0;
  double fraction = 1.0;
  std::set<Block*, BySize> free[2];  // large, small
  std::vector<Pending> pending;
  DeviceStats stats;
};

std::string shown(size_t bytes) {
  std::ostringstream text;
  text.precision(2);
  text.setf(std::ios::fixed);
  if (bytes < KIB) {
    text << bytes << " bytes";
  } else if (bytes < MIB) {
    text << double(bytes) / KIB << " KiB";
  } else if (bytes < GIB) {
    text << double(bytes) / MIB << " MiB";
  } else {
    text << double(bytes) / GIB << " GiB";
  }
  return text.str();
}

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

template <typename Stats>
void add(Stats& stats, bool is_small, int64_t amount) {
  for (const size_t at : {size_t(0), size_t(is_small ? 1 : 2)}) {
    if (amount >= 0) {
      stats[at].increase(amount);
    } else {
      stats[at].decrease(-amount);
    }
  }
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    const c10::Device where(c10::kCUDA, device);
    if (bytes == 0) return {nullptr, nullptr, &release, where};
    std::unique_lock<std::recursive_mutex> lock(mutex_);
    Block* const block = take(device, current_stream(device).id(), bytes);
    live_[block->pointer] = block;
    return {block->pointer, block->pointer, &release, where};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    submit(current_stream(current_device()), [=] { std::memcpy(to, from, bytes); });
  }

  bool initialized() override { return was_used(); }

  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < device_count(); ++device) {
      std::unique_lock<std::recursive_mutex> lock(mutex_);
      give_back(device);
    }
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    std::unique_lock<std::recursive_mutex> lock(mutex_);
    const auto found = live_.find(pointer.get());
    if (found != live_.end() && found->second->stream != stream.id()) {
      found->second->uses.insert(stream.id());
    }
  }

  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::unique_lock<std::recursive_mutex> lock(mutex_);
    return memory_[device].stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    reset(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_accumulated(); });
    std::unique_lock<std::recursive_mutex> lock(mutex_);
    memory_[device].stats.num_alloc_retries = memory_[device].stats.num_ooms = 0;
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    reset(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::unique_lock<std::recursive_mutex> lock(mutex_);
    const Memory& memory = memory_[device];
    const size_t used = memory.context + memory.others + reserved(memory);
    return {memory.total - std::min(memory.total, used), memory.total};
  }

  Memory& of(int device) { return memory_[device]; }
  std::recursive_mutex& mutex() { return mutex_; }

 private:
  static size_t reserved(const Memory& memory) { return memory.stats.reserved_bytes[0].current; }

  static void release(void* pointer);

  void give(void* pointer) {
    if (pointer == nullptr) return;
    std::unique_lock<std::recursive_mutex> lock(mutex_);
    Block* const block = live_.at(pointer);
    live_.erase(pointer);
    Memory& memory = memory_[block->device];
    block->allocated = false;
    add(memory.stats.allocation, block->is_small, -1);
    add(memory.stats.allocated_bytes, block->is_small, -int64_t(block->size));
    if (block->uses.empty()) return free(block);
    Pending pending{block, {}};
    for (const int64_t stream : block->uses) {
      pending.marks.push_back(mark(stream_of(block->device, stream)));
    }
    block->uses.clear();
    memory.pending.push_back(std::move(pending));
  }

  Block* take(int device, int64_t stream, size_t bytes) {
    Memory& memory = memory_[device];
    free_done(memory);
    const size_t size = rounded(bytes, ROUND);
    const bool is_small = size <= SMALL;
    Block* block = best_fit(memory, stream, size, is_small);
    if (block == nullptr) block = new_segment(device, stream, size, is_small);
    if (block->is_split()) {
      add(memory.stats.inactive_split, is_small, -1);
      add(memory.stats.inactive_split_bytes, is_small, -int64_t(block->size));
    }
    split(memory, block, size);
    block->allocated = true;
    block->requested = bytes;
    add(memory.stats.allocation, is_small, 1);
    add(memory.stats.allocated_bytes, is_small, block->size);
    add(memory.stats.active, is_small, 1);
    add(memory.stats.active_bytes, is_small, block->size);
    add(memory.stats.requested_bytes, is_small, bytes);
    return block;
  }

  static Block* best_fit(Memory& memory, int64_t stream, size_t size, bool is_small) {
    Block least{nullptr, size, 0, 0, stream, is_small};
    const auto found = memory.free[is_small].lower_bound(&least);
    if (found == memory.free[is_small].end() || (*found)->stream != stream) return nullptr;
    Block* const block = *found;
    memory.free[is_small].erase(found);
    return block;
  }

  static void split(Memory& memory, Block* block, size_t size) {
    const size_t rest = block->size - size;
    if (block->is_small ? rest < ROUND : rest <= SMALL) return;
    Block* const after = new Block{block->pointer + size, rest, 0, block->device, block->stream, block->is_small};
    after->previous = block;
    after->next = block->next;
    if (after->next != nullptr) after->next->previous = after;
    block->next = after;
    block->size = size;
    memory.free[block->is_small].insert(after);
    add(memory.stats.inactive_split, block->is_small, 1);
    add(memory.stats.inactive_split_bytes, block->is_small, rest);
  }

  Block* new_segment(int device, int64_t stream, size_t size, bool is_small) {
    Memory& memory = memory_[device];
    const size_t segment = is_small ? SMALL_SEGMENT
        : size < MIN_OWN_SEGMENT    ? LARGE_SEGMENT
                                    : rounded(size, ROUND_SEGMENT);
    if (!fits(memory, segment)) {
      ++memory.stats.num_alloc_retries;
      give_back(device);
      if (!fits(memory, segment)) fail(device, segment);
    }
    void* const pointer =
        mmap(nullptr, segment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(pointer != MAP_FAILED, "the host has no memory for the device");
    ++memory.stats.num_device_alloc;
    add(memory.stats.segment, is_small, 1);
    add(memory.stats.reserved_bytes, is_small, segment);
    return new Block{static_cast<char*>(pointer), segment, 0, device, stream, is_small};
  }

  static bool fits(const Memory& memory, size_t segment) {
    const size_t then = reserved(memory) + segment;
    return then <= size_t(memory.fraction * memory.total) &&
        then + memory.context + memory.others <= memory.total;
  }

  // Cached segments that are wholly free, once all streams are done: as cudaFree does.
  void give_back(int device) {
    Memory& memory = memory_[device];
    wait_device(device);
    free_done(memory);
    for (const int is_small : {0, 1}) {
      auto& pool = memory.free[is_small];
      for (auto one = pool.begin(); one != pool.end();) {
        Block* const block = *one;
        if (block->is_split()) {
          ++one;
          continue;
        }
        one = pool.erase(one);
        munmap(block->pointer, block->size);
        ++memory.stats.num_device_free;
        add(memory.stats.segment, is_small, -1);
        add(memory.stats.reserved_bytes, is_small, -int64_t(block->size));
        delete block;
      }
    }
  }

  [[noreturn]] void fail(int device, size_t segment) {
    Memory& memory = memory_[device];
    ++memory.stats.num_ooms;
    const size_t allocated = memory.stats.allocated_bytes[0].current;
    const auto [free, total] = getMemoryInfo(device);
    std::string allowed;
    if (memory.fraction < 1.0) allowed = shown(size_t(memory.fraction * total)) + " allowed; ";
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", shown(segment), ". GPU ", device,
        " has a total capacity of ", shown(total), " of which ", shown(free),
        " is free. Including non-PyTorch memory, this process has ", shown(memory.context + reserved(memory)),
        " memory in use. ", allowed, "Of the allocated memory ", shown(allocated),
        " is allocated by PyTorch, and ", shown(reserved(memory) - allocated),
        " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for "
        "Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)");
    abort();
  }

  void free_done(Memory& memory) {
    std::vector<Pending> kept;
    for (Pending& one : memory.pending) {
      bool done = true;
      for (const Mark& mark : one.marks) done = done && is_done(mark);
      if (done) {
        free(one.block);
      } else {
        kept.push_back(std::move(one));
      }
    }
    memory.pending = std::move(kept);
  }

  // Whoever gets the block next may write to it once its own stream has come so far: poison does.
  void free(Block* block) {
    Memory& memory = memory_[block->device];
    if (is_poisoning()) {
      submit(stream_of(block->device, block->stream), [pointer = block->pointer, size = block->size] { std::memset(pointer, 0xFF, size); });
    }
    add(memory.stats.active, block->is_small, -1);
    add(memory.stats.active_bytes, block->is_small, -int64_t(block->size));
    add(memory.stats.requested_bytes, block->is_small, -int64_t(block->requested));
    block = merged(memory, block, block->previous);
    block = merged(memory, block, block->next);
    memory.free[block->is_small].insert(block);
    if (block->is_split()) {
      add(memory.stats.inactive_split, block->is_small, 1);
      add(memory.stats.inactive_split_bytes, block->is_small, block->size);
    }
  }

  static Block* merged(Memory& memory, Block* block, Block* other) {
    if (other == nullptr || memory.free[block->is_small].erase(other) == 0) return block;
    add(memory.stats.inactive_split, block->is_small, -1);
    add(memory.stats.inactive_split_bytes, block->is_small, -int64_t(other->size));
    Block* const first = block->pointer < other->pointer ? block : other;
    Block* const second = first == block ? other : block;
    first->size += second->size;
    first->next = second->next;
    if (first->next != nullptr) first->next->previous = first;
    delete second;
    return first;
  }

  template <typename Reset>
  void reset(int device, const Reset& one) {
    std::unique_lock<std::recursive_mutex> lock(mutex_);
    DeviceStats& stats = memory_[device].stats;
    for (auto* const all :
         {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split, &stats.allocated_bytes,
          &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes, &stats.requested_bytes}) {
      for (auto& stat : *all) one(stat);
    }
  }

  std::recursive_mutex mutex_;
  std::unordered_map<void*, Block*> live_;
  Memory memory_[MAX_DEVICES];
};

DeviceMemory& memory() {
  static DeviceMemory* const one = new DeviceMemory;
  return *one;
}

void DeviceMemory::release(void* pointer) { memory().give(pointer); }

// Its priority is above that of the allocator which a build with CUDA would register.
const bool registered = (c10::SetAllocator(c10::kCUDA, &memory(), 1), true);

}  // namespace

c10::Allocator* device_allocator() { return &memory(); }

void record_stream(const c10::DataPtr& pointer, const c10::Stream& stream) {
  memory().recordStream(pointer, stream);
}

std::pair<size_t, size_t> free_and_total(int device) { return memory().getMemoryInfo(device); }

extern "C" {

void cuda_device_set_memory(int device, size_t total, size_t context, size_t others) {
  std::unique_lock<std::recursive_mutex> lock(memory().mutex());
  memory().of(device).total = total;
  memory().of(device).context = context;
  memory().of(device).others = others;
}

void cuda_device_set_fraction(int device, double fraction) { memory().of(device).fraction = fraction; }

double cuda_device_fraction(int device) { return memory().of(device).fraction; }

size_t cuda_device_free_bytes(int device) { return free_and_total(device).first; }

}  // extern "C"
}  // namespace cuda_device

// The CPU allocator of a process that stands for a device: counts bytes exactly, and refuses what
// goes beyond a cap with the error that CUDA raises, torch.OutOfMemoryError.
//
// Built once by build.py against the installed torch, loaded with ctypes by limit.py. Storages made
// before the install keep their own deleter, so they are neither counted nor harmed.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <cstdio>

namespace {

std::atomic<int64_t> current{0};
std::atomic<int64_t> peak{0};
std::atomic<int64_t> cap{-1};  // negative: count only
char owner[128] = "this process";
// What this thread allocates now is the host's: it counts for nothing, nor does its end.
thread_local bool on_host = false;

// Before each block: its size, and a mark that tells our blocks from those that code with a cached
// raw pointer (oneDNN's scratch) got from the former allocator. 64 bytes keep c10's alignment.
constexpr int64_t kMark = 0x6770756d69786d31;
struct alignas(64) Header {
  int64_t mark;
  int64_t size;
};
static_assert(sizeof(Header) == 64);

void release(void* data) {
  if (data == nullptr) return;
  Header* header = static_cast<Header*>(data) - 1;
  if (header->mark != kMark) {
    c10::free_cpu(data);
    return;
  }
  header->mark = 0;
  current.fetch_sub(header->size);
  c10::free_cpu(header);
}

// Compare-and-swap, so that an allocation that is refused never shows in `current` and cannot make
// another thread's allocation fail.
void reserve(int64_t size) {
  int64_t before = current.load();
  do {
    const int64_t limit = cap.load();
    if (limit >= 0 && size > limit - before) {
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, owner, " is out of memory: tried to allocate ", size,
          " bytes; ", before, " bytes in use of a cap of ", limit, " bytes");
    }
  } while (!current.compare_exchange_weak(before, before + size));
}

void note_peak() {
  const int64_t now = current.load();
  int64_t highest = peak.load();
  while (now > highest && !peak.compare_exchange_weak(highest, now)) {
  }
}

struct CappedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, cpu};
    const int64_t counted = on_host ? 0 : static_cast<int64_t>(bytes);
    reserve(counted);
    Header* header = nullptr;
    try {
      header = static_cast<Header*>(c10::alloc_cpu(bytes + sizeof(Header)));
    } catch (...) {
      current.fetch_sub(counted);
      throw;
    }
    note_peak();
    header->mark = kMark;
    header->size = counted;
    void* data = header + 1;
    return {data, data, &release, cpu};  // data == context: oneDNN asserts on it
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

CappedAllocator allocator;  // never destroyed before the process ends; c10 keeps the pointer

}  // namespace

extern "C" {
void gpumix_install() {
  static const bool once = [] {
    c10::SetCPUAllocator(&allocator, /*priority=*/255);
    return true;
  }();
  (void)once;
}
void gpumix_set_cap(int64_t bytes, const char* who) {
  std::snprintf(owner, sizeof owner, "%s", who);
  cap = bytes;
}
// Returns what it was before.
bool gpumix_set_on_host(bool now) {
  const bool before = on_host;
  on_host = now;
  return before;
}
int64_t gpumix_current() { return current; }
int64_t gpumix_peak() { return peak; }
void gpumix_reset_peak() { peak = current.load(); }
}

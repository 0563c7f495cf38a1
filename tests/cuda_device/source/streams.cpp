// Streams: a queue and a thread each, which run behind as tests want it.
#include "device.h"

#include <c10/util/Exception.h>

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>
#include <string>
#include <thread>

namespace cuda_device {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int POLLS = 3;  // so often may one ask before a held stream goes on

struct Queue {
  std::deque<std::pair<uint64_t, Work>> items;
  uint64_t submitted = 0, completed = 0, demanded = 0;
  int polls = 0, holds = 0;
  bool has_worker = false, is_side = false;
  std::string error;
  std::mt19937 delays;
  std::condition_variable wake;
};

struct State {
  std::mutex mutex;
  std::condition_variable progress;
  Queue* queues[MAX_DEVICES][STREAMS] = {};
  int next[MAX_DEVICES] = {};
  Lag lag[2] = {Lag::NONE, Lag::NONE};  // of default streams, of others
  unsigned seed = 0;
  int longest_us = 0;
  bool poisons = false;
};

State& state() {
  static State* const one = new State;  // never freed: workers outlive static objects
  return *one;
}

Queue& queue(int device, int64_t id) {  // with the lock held
  TORCH_CHECK(device >= 0 && device < MAX_DEVICES && id >= 0 && id < STREAMS, "no such stream");
  Queue*& found = state().queues[device][id];
  if (found == nullptr) {
    found = new Queue;
    found->is_side = id != 0;
    found->delays.seed(state().seed + 1000 * device + id);
  }
  return *found;
}

Lag lag_of(const Queue& q) { return q.holds ? Lag::HELD : state().lag[q.is_side]; }

void complete(Queue& q, uint64_t seq) {
  q.completed = seq;
  q.wake.notify_all();
  state().progress.notify_all();
}

void demand(Queue& q, uint64_t seq) {
  if (q.demanded < seq) {
    q.demanded = seq;
    q.wake.notify_all();
  }
}

// Until the first item may run. A held stream waits to be asked; so does a delayed one, in vain.
void delay(Queue& q, std::unique_lock<std::mutex>& lock) {
  const uint64_t seq = q.items.front().first;
  const auto due = [&] { return q.completed + 1 == seq && (q.demanded >= seq || lag_of(q) != Lag::HELD); };
  q.wake.wait(lock, due);
  if (lag_of(q) == Lag::RANDOM && q.delays() % 4 == 0) {
    const auto late = std::chrono::microseconds(q.delays() % (state().longest_us + 1));
    q.wake.wait_for(lock, late, [&] { return q.demanded >= seq; });
  }
}

void run_worker(Queue* q) {
  std::unique_lock<std::mutex> lock(state().mutex);
  while (true) {
    q->wake.wait(lock, [&] { return !q->items.empty(); });
    delay(*q, lock);
    auto [seq, work] = std::move(q->items.front());
    q->items.pop_front();
    lock.unlock();
    std::string error;
    try {
      work();
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
    work = nullptr;
    lock.lock();
    if (q->error.empty()) q->error = error;
    complete(*q, seq);
  }
}

uint64_t push(Queue& q, Work work) {
  const uint64_t seq = ++q.submitted;
  q.items.emplace_back(seq, std::move(work));
  if (!q.has_worker) {
    q.has_worker = true;
    std::thread(run_worker, &q).detach();
  }
  q.wake.notify_all();
  return seq;
}

// Work may need Python's lock, so whoever waits for work does not hold it.
class WithoutPython {
 public:
  WithoutPython() {
    static const auto is_held = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static const auto save = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    if (is_held != nullptr && is_held()) thread_ = save();
  }
  ~WithoutPython() {
    static const auto restore = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    if (thread_ != nullptr) restore(thread_);
  }

 private:
  void* thread_ = nullptr;
};

void wait_locked(Queue& q, uint64_t seq, std::unique_lock<std::mutex>& lock) {
  demand(q, seq);
  state().progress.wait(lock, [&] { return q.completed >= seq; });
  if (!q.error.empty()) {
    const std::string error = std::exchange(q.error, "");
    lock.unlock();
    TORCH_CHECK(false, "CUDA error: device-side assert triggered: ", error);
  }
}

// Runs it as work number `seq` of its stream, which has come so far.
void run_as(Queue& q, uint64_t seq, const Work& work, std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  struct Completed {
    Queue& q;
    uint64_t seq;
    ~Completed() {
      std::lock_guard<std::mutex> again(state().mutex);
      complete(q, seq);
    }
  } completed{q, seq};
  work();
}

bool is_prompt(const Queue& q) {
  return q.completed == q.submitted && lag_of(q) == Lag::NONE;
}

}  // namespace

c10::Stream new_stream(int device) {
  std::lock_guard<std::mutex> lock(state().mutex);
  const int64_t id = 1 + state().next[device]++ % (STREAMS - 1);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), id);
}

Mark mark(const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return {stream.device_index(), stream.id(), queue(stream.device_index(), stream.id()).submitted};
}

bool is_done(const Mark& mark) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return queue(mark.device, mark.stream).completed >= mark.seq;
}

bool poll(const Mark& mark) {
  std::lock_guard<std::mutex> lock(state().mutex);
  Queue& q = queue(mark.device, mark.stream);
  if (q.completed >= mark.seq) return true;
  if (++q.polls >= POLLS) {
    q.polls = 0;
    demand(q, mark.seq);
  }
  return false;
}

void wait(const Mark& mark) {
  const WithoutPython without;
  std::unique_lock<std::mutex> lock(state().mutex);
  wait_locked(queue(mark.device, mark.stream), mark.seq, lock);
}

void wait_device(int device) {
  const WithoutPython without;
  for (int64_t id = 0; id < STREAMS; ++id) {
    std::unique_lock<std::mutex> lock(state().mutex);
    Queue* const q = state().queues[device][id];
    if (q != nullptr) wait_locked(*q, q->submitted, lock);
  }
}

void order(const c10::Stream& stream, const Mark& mark) {
  if (stream.device_index() == mark.device && stream.id() == mark.stream) return;
  std::lock_guard<std::mutex> lock(state().mutex);
  if (queue(mark.device, mark.stream).completed >= mark.seq) return;
  push(queue(stream.device_index(), stream.id()), [mark] {
    std::unique_lock<std::mutex> lock(state().mutex);
    Queue& q = queue(mark.device, mark.stream);
    demand(q, mark.seq);
    state().progress.wait(lock, [&] { return q.completed >= mark.seq; });
  });
}

bool is_prompt(const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return is_prompt(queue(stream.device_index(), stream.id()));
}

Mark submit(const c10::Stream& stream, Work work) {
  std::unique_lock<std::mutex> lock(state().mutex);
  Queue& q = queue(stream.device_index(), stream.id());
  if (!is_prompt(q)) return {stream.device_index(), stream.id(), push(q, std::move(work))};
  const uint64_t seq = ++q.submitted;
  run_as(q, seq, work, lock);
  return {stream.device_index(), stream.id(), seq};
}

Mark enqueue(const c10::Stream& stream, Work work) {
  std::lock_guard<std::mutex> lock(state().mutex);
  Queue& q = queue(stream.device_index(), stream.id());
  return {stream.device_index(), stream.id(), push(q, std::move(work))};
}

void run_here(const c10::Stream& stream, const Work& work) {
  const WithoutPython without;
  std::unique_lock<std::mutex> lock(state().mutex);
  Queue& q = queue(stream.device_index(), stream.id());
  const uint64_t seq = ++q.submitted;
  demand(q, seq - 1);
  state().progress.wait(lock, [&] { return q.completed + 1 == seq; });
  run_as(q, seq, work, lock);
}

bool is_poisoning() { return state().poisons; }

extern "C" {

void cuda_device_set_lag(int of_default, int of_others, unsigned seed, int longest_us, int poisons) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().lag[0] = Lag(of_default);
  state().lag[1] = Lag(of_others);
  state().seed = seed;
  state().longest_us = longest_us;
  state().poisons = poisons != 0;
  for (int device = 0; device < MAX_DEVICES; ++device) {
    for (int64_t id = 0; id < STREAMS; ++id) {
      Queue* const q = state().queues[device][id];
      if (q == nullptr) continue;
      q->polls = 0;
      q->delays.seed(seed + 1000 * device + id);
      q->wake.notify_all();
    }
  }
}

void cuda_device_hold(int device, int64_t stream, int held) {
  std::lock_guard<std::mutex> lock(state().mutex);
  Queue& q = queue(device, stream);
  q.holds += held ? 1 : -1;
  q.wake.notify_all();
}

void cuda_device_sleep(int device, int64_t nanoseconds) {
  enqueue(current_stream(device), [nanoseconds] {
    std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds));
  });
}

// The stream calls the function with the number when it comes there; it may need Python's lock. It
// is not held, whatever the lag: other processes wait for what it does.
void cuda_device_call(int device, int64_t stream, void (*function)(int64_t), int64_t number) {
  std::lock_guard<std::mutex> lock(state().mutex);
  Queue& q = queue(device, stream);
  demand(q, push(q, [function, number] { function(number); }));
}

}  // extern "C"
}  // namespace cuda_device

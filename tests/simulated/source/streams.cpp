// Devices, streams, events, and how often the host waits for them.
#include "core.h"
#include <c10/util/Exception.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <atomic>
#include <cstdlib>
#include <thread>

namespace sim {

int64_t env_int(const char* name, int64_t fallback) {
  const char* value = std::getenv(name);
  return value && *value ? std::atoll(value) : fallback;
}
void nap(int64_t microseconds) {
  if (microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

// ---------------------------------------------------------------- devices
static thread_local int t_device = 0;
static std::atomic<int64_t> g_touched[64];

int device_count() {
  static const int count = env_int("SIM_DEVICES", 2);
  return count;
}
int current_device() { return t_device; }
void set_device(int index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "sim: invalid device ordinal ", index);
  t_device = index;
}
int or_current(int index) { return index < 0 ? t_device : index; }
int64_t touched(int device) { return g_touched[device].load(); }

// ---------------------------------------------------------------- errors
static std::mutex g_error_mutex;
static auto& g_error = *new std::exception_ptr();

void set_sticky(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(g_error_mutex);
  if (!g_error) g_error = error;
}
void check_sticky() {
  std::lock_guard<std::mutex> lock(g_error_mutex);
  if (g_error) std::rethrow_exception(g_error);
}

// ---------------------------------------------------------------- events
void EventState::finish() {
  std::lock_guard<std::mutex> lock(mutex_);
  done_ = true;
  at = std::chrono::steady_clock::now();
  changed_.notify_all();
}
void EventState::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return done_; });
}
bool EventState::query() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

// ---------------------------------------------------------------- streams
void Stream::loop() {
  t_device = device;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::NoGradGuard no_grad;
  while (true) {
    std::function<void()> task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      filled_.wait(lock, [&] { return !queue_.empty(); });
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    try {
      task();
    } catch (...) {
      set_sticky(std::current_exception());
    }
    task = nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    ++done_;
    finished_.notify_all();
  }
}
void Stream::enqueue(std::function<void()> task) {
  g_touched[device]++;
  std::lock_guard<std::mutex> lock(mutex_);
  if (submitted_++ == 0) std::thread([this] { loop(); }).detach();
  queue_.push_back(std::move(task));
  filled_.notify_one();
}
void Stream::synchronize() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this, target = submitted_] { return done_ >= target; });
  }
  check_sticky();
}
bool Stream::query() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ == submitted_;
}
EventPtr Stream::record() {
  auto event = std::make_shared<EventState>();
  enqueue([event] { event->finish(); });
  return event;
}
void Stream::wait_for(EventPtr event) {
  enqueue([event] { event->wait(); });
}

static std::mutex g_streams_mutex;
static auto& g_streams = *new std::map<std::pair<int, int64_t>, Stream*>();
static thread_local std::map<int, int64_t> t_current;

Stream* stream_of(int device, int64_t id) {
  std::lock_guard<std::mutex> lock(g_streams_mutex);
  auto& stream = g_streams[{device, id}];
  if (!stream) stream = new Stream(device, id);
  return stream;
}
Stream* current_stream(int device) {
  auto it = t_current.find(device);
  return stream_of(device, it == t_current.end() ? 0 : it->second);
}
void set_current_stream(int device, int64_t id) { t_current[device] = id; }
std::vector<Stream*> streams_of(int device) {
  std::lock_guard<std::mutex> lock(g_streams_mutex);
  std::vector<Stream*> all;
  for (auto& [key, stream] : g_streams)
    if (key.first == device) all.push_back(stream);
  return all;
}
int64_t new_stream_id() {  // as many as CUDA's pool has
  static std::atomic<int64_t> next{0};
  return 1 + next++ % 32;
}

// ---------------------------------------------------------------- when the host waits
PythonHooks& python_hooks() {
  static auto& hooks = *new PythonHooks();
  return hooks;
}
HostWait::HostWait(const std::string& kind) {
  if (python_hooks().report) python_hooks().on_wait(kind);
  if (python_hooks().release_lock) python_ = python_hooks().release_lock();
}
HostWait::HostWait() {
  if (python_hooks().release_lock) python_ = python_hooks().release_lock();
}
HostWait::~HostWait() {
  if (python_hooks().take_lock) python_hooks().take_lock(python_);
}
}  // namespace sim

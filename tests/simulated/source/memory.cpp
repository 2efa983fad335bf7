// Device memory, in blocks that are used again in the order of their stream, and pinned host memory.
#include "core.h"
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

namespace sim {
namespace {
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

const bool kProtect = env_int("SIM_PROTECT", 0);
const bool kPoison = env_int("SIM_POISON", 1);
constexpr size_t kUnit = 512, kSmall = 1 << 20;  // the CUDA caching allocator's rounding, and its small pool
constexpr size_t kPage = 4096;

size_t capacity() {  // of each device, in bytes
  static const size_t bytes = env_int("SIM_MEMORY_MB", 80 * 1024) << 20;
  return bytes;
}
size_t rounded(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

struct Block {
  void* pointer;
  size_t size;  // what it takes; `counted` of it in the statistics
  int device;
  Stream* stream;
  size_t requested = 0, counted = 0;
  int open = 0;                // how many `Access` there are
  std::vector<EventPtr> uses;  // by other streams
};
std::mutex g_mutex;  // guards all of these
auto& g_blocks = *new std::map<char*, Block*>();
auto& g_free = *new std::map<std::pair<Stream*, size_t>, std::vector<Block*>>();
auto& g_limbo = *new std::vector<Block*>();  // freed, but a use by another stream is under way
thread_local int t_unpoisoned = 0;
auto& g_stats = *new std::array<DeviceStats, 64>();

template <typename F>
void both_pools(StatArray& stats, size_t size, F change) {
  change(stats[(size_t)StatType::AGGREGATE]);
  change(stats[(size_t)(size <= kSmall ? StatType::SMALL_POOL : StatType::LARGE_POOL)]);
}
void grow(StatArray& stats, const Block& b, size_t by) {
  both_pools(stats, b.counted, [&](auto& stat) { stat.increase(by); });
}
void shrink(StatArray& stats, const Block& b, size_t by) {
  both_pools(stats, b.counted, [&](auto& stat) { stat.decrease(by); });
}

Block* block_of(const void* p) {  // g_mutex held
  auto it = g_blocks.upper_bound((char*)p);
  if (it == g_blocks.begin()) return nullptr;
  --it;
  return (char*)p < it->first + it->second->size ? it->second : nullptr;
}

// Back to where it can be given out again; g_mutex held. Whoever gets it is ordered after its stream.
void recycle(Block* b) {
  auto& stats = g_stats[b->device];
  shrink(stats.active, *b, 1);
  shrink(stats.active_bytes, *b, b->counted);
  g_free[{b->stream, b->size}].push_back(b);
}
void release(void* context) {
  auto b = (Block*)context;
  std::lock_guard<std::mutex> lock(g_mutex);
  auto& stats = g_stats[b->device];
  shrink(stats.allocation, *b, 1);
  shrink(stats.allocated_bytes, *b, b->counted);
  shrink(stats.requested_bytes, *b, b->requested);
  if (b->uses.empty())
    recycle(b);
  else
    g_limbo.push_back(b);
}
void empty_limbo() {  // g_mutex held
  std::vector<Block*> left;
  for (auto b : g_limbo) {
    if (std::all_of(b->uses.begin(), b->uses.end(), [](auto& use) { return use->query(); })) {
      b->uses.clear();
      recycle(b);
    } else {
      left.push_back(b);
    }
  }
  g_limbo = left;
}
void free_cached() {
  for (int device = 0; device < device_count(); device++)
    for (auto stream : streams_of(device)) stream->synchronize();
  std::lock_guard<std::mutex> lock(g_mutex);
  empty_limbo();
  for (auto& [key, list] : g_free) {
    for (auto b : list) {
      auto& stats = g_stats[b->device];
      shrink(stats.segment, *b, 1);
      shrink(stats.reserved_bytes, *b, b->counted);
      stats.num_device_free++;
      g_blocks.erase((char*)b->pointer);
      kProtect ? (void)::munmap(b->pointer, b->size) : ::free(b->pointer);
      delete b;
    }
  }
  g_free.clear();
}

Block* cached(Stream* stream, size_t size) {  // g_mutex held
  auto it = g_free.find({stream, size});
  if (it == g_free.end() || it->second.empty()) return nullptr;
  auto b = it->second.back();
  it->second.pop_back();
  return b;
}
Block* fresh(Stream* stream, size_t size, size_t counted) {  // g_mutex held; null if the device is full
  auto& stats = g_stats[stream->device];
  const size_t reserved = stats.reserved_bytes[(size_t)StatType::AGGREGATE].current;
  if (reserved + counted > capacity()) return nullptr;
  void* p = nullptr;
  if (kProtect) {
    p = ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(p != MAP_FAILED, "sim: this machine has no memory left");
  } else {
    TORCH_CHECK(::posix_memalign(&p, kUnit, size) == 0, "sim: this machine has no memory left");
  }
  auto b = new Block{p, size, stream->device, stream};
  b->counted = counted;
  g_blocks[(char*)p] = b;
  grow(stats.segment, *b, 1);
  grow(stats.reserved_bytes, *b, counted);
  stats.num_device_alloc++;
  return b;
}
Block* take(Stream* stream, size_t requested) {
  const size_t counted = rounded(requested, kUnit), size = rounded(requested, kProtect ? kPage : kUnit);
  auto& stats = g_stats[stream->device];
  std::unique_lock<std::mutex> lock(g_mutex);
  empty_limbo();
  auto find = [&] {
    auto b = cached(stream, size);
    return b ? b : fresh(stream, size, counted);
  };
  auto b = find();
  if (!b) {
    stats.num_alloc_retries++;
    lock.unlock();
    free_cached();
    lock.lock();
    b = find();
  }
  if (!b) {
    stats.num_ooms++;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "sim: out of memory: device ", stream->device, " has ", capacity(),
        " bytes (SIM_MEMORY_MB), of which ", stats.allocated_bytes[(size_t)StatType::AGGREGATE].current,
        " are allocated; ", requested, " more were asked for");
  }
  b->requested = requested;
  grow(stats.allocation, *b, 1);
  grow(stats.active, *b, 1);
  grow(stats.allocated_bytes, *b, b->counted);
  grow(stats.active_bytes, *b, b->counted);
  grow(stats.requested_bytes, *b, requested);
  return b;
}
void poison(Block* b) {
  b->stream->enqueue([pointer = b->pointer, size = b->size] {
    Access access({pointer});
    std::memset(pointer, 0xFF, size);
  });
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    const int index = current_device();
    const c10::Device device(kType, (c10::DeviceIndex)index);
    if (n == 0) return {nullptr, nullptr, [](void*) {}, device};
    auto b = take(current_stream(index), n);
    if (kPoison && t_unpoisoned == 0) poison(b);  // as the next owner would write to it: no earlier than its stream gets there
    return {b->pointer, b, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override {
    current_stream(current_device())->enqueue([=] {
      Access access({to, from});
      std::memcpy(to, from, n);
    });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    HostWait wait("empty_cache");
    free_cached();
  }
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    record_use(memory, stream_of(stream.device_index(), stream.id()));
  }
  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(g_mutex);
    return g_stats[device];
  }
  template <typename F>
  static void each_stat(int device, F change) {
    std::lock_guard<std::mutex> lock(g_mutex);
    auto& s = g_stats[device];
    for (auto array : {&s.allocation, &s.segment, &s.active, &s.inactive_split, &s.allocated_bytes,
                       &s.reserved_bytes, &s.active_bytes, &s.inactive_split_bytes, &s.requested_bytes})
      for (auto& stat : *array) change(stat);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each_stat(device, [](auto& stat) { stat.reset_accumulated(); });
    auto& s = g_stats[device];
    s.num_alloc_retries = s.num_ooms = s.num_device_alloc = s.num_device_free = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    each_stat(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(g_mutex);
    return {capacity() - g_stats[device].reserved_bytes[(size_t)StatType::AGGREGATE].current, capacity()};
  }
};
auto& g_allocator = *new DeviceAllocator();
}  // namespace
REGISTER_ALLOCATOR(kType, &g_allocator);

c10::DeviceAllocator& device_allocator() { return g_allocator; }
Unpoisoned::Unpoisoned() { t_unpoisoned++; }
Unpoisoned::~Unpoisoned() { t_unpoisoned--; }
int device_of(const void* pointer) {
  std::lock_guard<std::mutex> lock(g_mutex);
  auto b = block_of(pointer);
  TORCH_CHECK(b, "sim: not a device pointer");
  return b->device;
}
void record_use(const c10::DataPtr& memory, Stream* stream) {
  auto b = (Block*)memory.get_context();
  if (!b || b->stream == stream) return;
  auto use = stream->record();
  std::lock_guard<std::mutex> lock(g_mutex);
  b->uses.push_back(use);
}

Access::Access(const std::vector<const void*>& pointers) {
  if (!kProtect) return;
  std::lock_guard<std::mutex> lock(g_mutex);
  for (auto p : pointers) {
    auto b = p ? block_of(p) : nullptr;
    if (!b) continue;
    if (b->open++ == 0) ::mprotect(b->pointer, b->size, PROT_READ | PROT_WRITE);
    blocks_.push_back(b);
  }
}
Access::~Access() {
  if (blocks_.empty()) return;
  std::lock_guard<std::mutex> lock(g_mutex);
  for (auto p : blocks_) {
    auto b = (Block*)p;
    if (--b->open == 0) ::mprotect(b->pointer, b->size, PROT_NONE);
  }
}

// ---------------------------------------------------------------- pinned host memory
namespace {
struct Pinned {
  void* pointer;
  size_t size;
  std::vector<EventPtr> uses;  // copies that read or write it
};
std::mutex g_pin_mutex;  // guards both of these
auto& g_pinned = *new std::map<char*, Pinned*>();
auto& g_pinned_limbo = *new std::vector<Pinned*>();  // freed by the host; given back after the last use

Pinned* pinned_of(const void* p) {  // g_pin_mutex held
  auto it = g_pinned.upper_bound((char*)p);
  if (it == g_pinned.begin()) return nullptr;
  --it;
  return (char*)p < it->first + it->second->size ? it->second : nullptr;
}
void free_unused() {  // g_pin_mutex held
  std::vector<Pinned*> left;
  for (auto b : g_pinned_limbo) {
    if (!std::all_of(b->uses.begin(), b->uses.end(), [](auto& use) { return use->query(); })) {
      left.push_back(b);
      continue;
    }
    g_pinned.erase((char*)b->pointer);
    std::memset(b->pointer, 0xFF, b->size);
    ::free(b->pointer);
    delete b;
  }
  g_pinned_limbo = left;
}
void release_pinned(void* context) {
  std::lock_guard<std::mutex> lock(g_pin_mutex);
  g_pinned_limbo.push_back((Pinned*)context);
  free_unused();
}
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    const size_t size = std::max<size_t>(n, 1);
    TORCH_CHECK(::posix_memalign(&p, kPage, size) == 0, "sim: out of host memory");
    auto b = new Pinned{p, size, {}};
    std::lock_guard<std::mutex> lock(g_pin_mutex);
    free_unused();
    g_pinned[(char*)p] = b;
    return {p, b, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
auto& g_pinned_allocator = *new PinnedAllocator();
}  // namespace

c10::Allocator& pinned_allocator() { return g_pinned_allocator; }
bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(g_pin_mutex);
  return pinned_of(pointer) != nullptr;
}
void use_pinned(const void* pointer, EventPtr until) {
  std::lock_guard<std::mutex> lock(g_pin_mutex);
  if (auto b = pinned_of(pointer)) b->uses.push_back(until);
}
}  // namespace sim

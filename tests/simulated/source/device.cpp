// What torch asks of a device type: a guard, random numbers and hooks.
#include "tensors.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <algorithm>
#include <cstring>

namespace sim {
namespace {
// ---------------------------------------------------------------- guard: current device, streams, events
struct Event {
  EventPtr state;  // of the last record()
};
struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  static Device device_at(int index) { return {kType, (c10::DeviceIndex)index}; }
  static c10::Stream wrap(Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device_at(or_current(device.index())), id);
  }
  static Stream* unwrap(const c10::Stream& s) { return stream_of(s.device_index(), s.id()); }

  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
  Device getDevice() const override { return device_at(current_device()); }
  void setDevice(Device d) const override { set_device(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { set_device(d.index()); }
  Device exchangeDevice(Device d) const override {
    auto before = getDevice();
    set_device(d.index());
    return before;
  }

  c10::Stream getStream(Device d) const override { return wrap(d, current_stream(or_current(d.index()))->id); }
  c10::Stream getDefaultStream(Device d) const override { return wrap(d, 0); }
  c10::Stream getNewStream(Device d, int) const override { return wrap(d, new_stream_id()); }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return wrap(d, new_stream_id()); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    set_current_stream(s.device_index(), s.id());
    return before;
  }
  bool queryStream(const c10::Stream& s) const override { return unwrap(s)->query(); }
  void synchronizeStream(const c10::Stream& s) const override {
    HostWait wait("stream");
    unwrap(s)->synchronize();
  }
  void synchronizeDevice(const c10::DeviceIndex i) const override {
    HostWait wait("device");
    for (auto s : streams_of(or_current(i))) s->synchronize();
  }

  void record(void** e, const c10::Stream& s, const c10::DeviceIndex i, const c10::EventFlag) const override {
    TORCH_CHECK(
        i == -1 || i == s.device_index(), "Event device index ", (int)i,
        " does not match recording stream's device index ", (int)s.device_index(), ".");
    if (!*e) *e = new Event();
    ((Event*)*e)->state = unwrap(s)->record();
  }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete (Event*)e; }
  void block(void* e, const c10::Stream& s) const override {
    if (e && ((Event*)e)->state) unwrap(s)->wait_for(((Event*)e)->state);
  }
  bool queryEvent(void* e) const override { return !e || ((Event*)e)->state->query(); }
  void synchronizeEvent(void* e) const override {
    HostWait wait("event");
    if (e) ((Event*)e)->state->wait();
    check_sticky();
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto span = ((Event*)to)->state->at - ((Event*)from)->state->at;
    return std::chrono::duration<double, std::milli>(span).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override { record_use(p, unwrap(s)); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---------------------------------------------------------------- random numbers
struct Generator final : c10::GeneratorImpl {
  at::Generator cpu = at::detail::createCPUGenerator();
  explicit Generator(int device)
      : c10::GeneratorImpl(Guard::device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& s) override { cpu.unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override {
    auto copy = new Generator(device().index());
    copy->cpu = cpu.clone();
    return copy;
  }
};

// ---------------------------------------------------------------- hooks
struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex i) const override { return touched(i) > 0; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_device(d); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    auto before = current_device();
    set_device(d);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return d < 0 || d >= device_count() ? current_device() : exchangeDevice(d);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Device getDeviceFromPtr(void* p) const override { return Guard::device_at(device_of(p)); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override { return at::make_generator<Generator>(or_current(i)); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(impl->device());
    c10::DataPtr larger = device_allocator().allocate(n);
    const size_t kept = std::min(n, (size_t)impl->nbytes());
    if (kept) device_allocator().copy_data(larger.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(larger));
    impl->set_nbytes(n);
  }
};
const bool g_hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();
}  // namespace

const at::Generator& default_generator(int device) {
  static auto& all = *[] {
    auto made = new std::vector<at::Generator>();
    for (int i = 0; i < device_count(); i++) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all.at(or_current(device));
}
at::Generator cpu_generator(const at::Generator& generator) {
  auto impl = generator.unsafeGetGeneratorImpl();
  return generator.device().type() == kType ? ((Generator*)impl)->cpu : generator;
}
}  // namespace sim

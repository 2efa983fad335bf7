// Tensors and operators of the simulated device.
//
// Making, viewing and copying tensors is written out here, with CUDA's rules. Every other operator ends in `fallback`,
// which lets the CPU's own kernel work on the same memory, on the thread of the current stream.
#include "tensors.h"
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#include <cstring>
#include <set>
#include <shared_mutex>
#include <unordered_map>

namespace sim {

// ---------------------------------------------------------------- making and viewing
at::Tensor cpu_view(const at::Tensor& t) {
  auto options = t.options().device(c10::kCPU).requires_grad(false).pinned_memory(false);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), options);
}

static at::Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided && !c10::pinned_memory_or_default(pin));
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      size, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}
static at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided && !c10::pinned_memory_or_default(pin));
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}
static at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}
static const at::Tensor& resize_(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
static at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
static at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
static at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}
static at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, source); }
static at::Tensor& set_storage_at(
    at::Tensor& self, at::Storage s, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, s, offset, size, stride);
}
// `cpu_parameter.data = sim_tensor` works, as with CUDA.
static bool compatible(const at::Tensor& a, const at::Tensor& b) {
  auto dense = [](const at::Tensor& t) { return t.layout() == c10::kStrided && (t.is_cpu() || on_sim(t)); };
  return dense(a) && dense(b);
}
static void record_stream(at::Tensor& self, c10::Stream s) {
  record_use(self.storage().data_ptr(), stream_of(s.device_index(), s.id()));
}

// ---------------------------------------------------------------- what a queued task knows of a tensor
// A kernel has a pointer and no claim to the memory: who frees a tensor too early is to see what CUDA would do.
struct Memory {
  void* pointer;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;
  explicit Memory(const at::Tensor& t)
      : pointer(t.numel() ? t.data_ptr() : nullptr), sizes(t.sizes().vec()), strides(t.strides().vec()),
        dtype(t.scalar_type()) {}
  at::Tensor tensor() const { return at::from_blob(pointer, sizes, strides, at::TensorOptions(dtype)); }
  size_t bytes() const {  // from the first element to the last
    return at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(dtype));
  }
};

// ---------------------------------------------------------------- copies
static const int64_t kCopyDelay = env_int("SIM_COPY_DELAY_US", 0);

enum class Path { on_device, bus };
static void launch_copy(Stream* stream, const at::Tensor& from, const at::Tensor& to, Path path, at::Tensor keep = {}) {
  stream->enqueue([from = Memory(from), to = Memory(to), path, keep] {
    if (path == Path::bus) nap(kCopyDelay);
    Access access({from.pointer, to.pointer});
    auto target = to.tensor();
    target.copy_(from.tensor());
  });
}

static at::Tensor copy_on_devices(const at::Tensor& self, const at::Tensor& dst) {
  auto sender = current_stream(self.device().index());
  if (self.device() == dst.device()) {
    launch_copy(sender, self, dst, Path::on_device);
    return dst;
  }
  auto receiver = current_stream(dst.device().index());
  sender->wait_for(receiver->record());
  launch_copy(sender, self, dst, Path::bus);
  receiver->wait_for(sender->record());
  return dst;
}

// What crosses the bus is contiguous and of one dtype; what is not is made so on the side that CUDA makes it on.
static at::Tensor copy_in_parts(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  const bool convert_at_source = on_sim(self) == non_blocking;
  auto target = dst, source = self;
  if (convert_at_source) {
    if (!dst.is_contiguous()) target = at::empty_like(dst, at::MemoryFormat::Contiguous);
    source = self.to(dst.scalar_type()).contiguous();
  } else {
    auto options = dst.options().dtype(self.scalar_type()).requires_grad(false);
    if (!dst.is_contiguous() || self.scalar_type() != dst.scalar_type())
      target = at::empty_like(dst, options, at::MemoryFormat::Contiguous);
    source = self.contiguous();
  }
  target.copy_(source, non_blocking);
  if (!target.is_same(dst)) const_cast<at::Tensor&>(dst).copy_(target, non_blocking);
  return dst;
}

static void copy_to_device(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  auto stream = current_stream(dst.device().index());
  // CUDA stages 64 KiB of pageable memory by itself; for more the host waits.
  bool staged_by_itself = self.nbytes() <= (64 << 10);
  if (!non_blocking || !(staged_by_itself || is_pinned(self.data_ptr()))) {
    HostWait wait(non_blocking ? "copy from pageable memory" : "copy to device");
    launch_copy(stream, self, dst, Path::bus);
    stream->synchronize();
  } else if (is_pinned(self.data_ptr())) {
    launch_copy(stream, self, dst, Path::bus);
    use_pinned(self.data_ptr(), stream->record());
  } else {  // pageable: staged before the call returns
    auto staged = self.clone();
    launch_copy(stream, staged, dst, Path::bus, staged);
  }
}
static void copy_to_host(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  auto stream = current_stream(self.device().index());
  if (non_blocking && is_pinned(dst.data_ptr())) {
    launch_copy(stream, self, dst, Path::bus);
    use_pinned(dst.data_ptr(), stream->record());
    return;
  }
  HostWait wait(non_blocking ? "copy to pageable memory" : "copy to host");
  launch_copy(stream, self, dst, Path::bus);
  stream->synchronize();
}

static at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (self.numel() == 0 || self.is_same(dst)) return dst;
  if (self.sizes() != dst.sizes()) return copy_from(self.expand_as(dst), dst, non_blocking);
  if (on_sim(self) && on_sim(dst)) return copy_on_devices(self, dst);
  if (self.scalar_type() != dst.scalar_type() || !self.is_contiguous() || !dst.is_contiguous())
    return copy_in_parts(self, dst, non_blocking);
  on_sim(dst) ? copy_to_device(self, dst, non_blocking) : copy_to_host(self, dst, non_blocking);
  return dst;
}
static at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  const_cast<at::Tensor&>(dst).resize_(self.sizes());
  return copy_from(self, dst, false);
}
static at::Scalar local_scalar_dense(const at::Tensor& self) {
  HostWait wait("item");
  current_stream(self.device().index())->synchronize();
  Access access({self.data_ptr()});
  return cpu_view(self).item();
}

// ---------------------------------------------------------------- what an operator's schema says of it
struct Facts {
  std::vector<bool> writes, is_generator, is_number;  // of each argument
  bool in_place;        // each result is one of its arguments, or there is none
  bool may_view;        // a result may share memory with an argument
  bool only_new;        // results are new tensors, and lists of them
  bool random;          // draws random numbers
  bool depends_on_data; // what it returns, or of which shape, depends on values: CUDA waits for them too
  bool mixes;           // takes indices in the host's memory, and copies them
  HostKernel kernel;    // what stands for a kernel that the CPU does not have
};
static Facts read_facts(const c10::OperatorHandle& op) {
  static const std::set<std::string> mixing{"aten::index", "aten::index_put", "aten::index_put_",
                                            "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put"};
  static const std::set<std::string> numbers{"Scalar", "Scalar?", "Scalar[]", "number", "number?", "number[]"};
  const auto& schema = op.schema();
  Facts f{};
  f.random = op.hasTag(at::Tag::nondeterministic_seeded);
  for (auto& a : schema.arguments()) {
    f.writes.push_back(a.alias_info() && a.alias_info()->isWrite());
    f.is_generator.push_back(a.type()->str().rfind("Generator", 0) == 0);
    f.is_number.push_back(numbers.count(a.type()->str()) > 0);
    f.random |= f.is_generator.back();
  }
  f.in_place = true;
  f.only_new = !schema.returns().empty();
  for (auto& r : schema.returns()) {
    const bool written = r.alias_info() && r.alias_info()->isWrite();
    f.in_place &= written;
    f.may_view |= r.alias_info() && !written;
    const auto type = r.type()->str();
    f.only_new &= !r.alias_info() && (type == "Tensor" || type == "Tensor[]");
  }
  f.depends_on_data = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  f.mixes = mixing.count(schema.name()) > 0;
  f.kernel = host_kernel(op);
  return f;
}
static const Facts& facts_of(const c10::OperatorHandle& op) {
  static std::shared_mutex mutex;
  static auto& known = *new std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<Facts>>();
  {
    std::shared_lock<std::shared_mutex> lock(mutex);
    if (auto it = known.find(&op.schema()); it != known.end()) return *it->second;
  }
  std::unique_lock<std::shared_mutex> lock(mutex);
  auto& facts = known[&op.schema()];
  if (!facts) facts = std::make_unique<Facts>(read_facts(op));
  return *facts;
}

// ---------------------------------------------------------------- one call of an operator
template <typename F>
static void each_tensor(const c10::IValue& v, F f) {
  if (v.isTensor()) {
    f(v.toTensor());
  } else if (v.isTensorList()) {
    for (const at::Tensor& t : v.toTensorVector()) f(t);
  } else if (v.isOptionalTensorList()) {
    for (const auto& t : v.toOptionalTensorVector())
      if (t) f(*t);
  }
}
template <typename F>
static c10::IValue with_tensors(const c10::IValue& v, F f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : v.toTensorVector()) list.push_back(f(t));
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& t : v.toOptionalTensorVector()) list.push_back(t ? std::optional<at::Tensor>(f(*t)) : std::nullopt);
    return list;
  }
  return v;
}

struct Call {
  const c10::OperatorHandle op;
  const Facts& facts;
  std::vector<c10::IValue> given;  // arguments on the device
  torch::jit::Stack arguments;     // the same as the CPU's kernel takes them
  std::vector<at::Tensor> tensors; // of the device, among them
  std::vector<const void*> pointers;
  std::vector<std::pair<at::Tensor, at::Tensor>> growing;  // results of no size yet: (device's, host's)
  bool has_host_tensor = false;    // which CUDA would copy to the device first
  int device = -1;
  Stream* stream = nullptr;

  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op(op), facts(facts_of(op)) {
    given = torch::jit::pop(*stack, op.schema().arguments().size());
    find_device();
    stream = current_stream(device);
    for (size_t i = 0; i < given.size(); i++) arguments.push_back(on_host(i));
  }
  const std::string& name() const { return op.schema().name(); }

  void find_device() {
    auto look = [&](const at::Tensor& t) {
      if (!t.defined()) return;
      if (on_sim(t)) {
        TORCH_CHECK(
            device < 0 || device == t.device().index(), name(),
            ": Expected all tensors to be on the same device, found sim:", device, " and ", t.device());
        device = t.device().index();
      } else if (t.is_cpu() && t.dim() > 0) {
        has_host_tensor = true;
      }
    };
    for (auto& v : given) each_tensor(v, look);
    TORCH_CHECK(
        !has_host_tensor || device < 0 || facts.mixes, name(),
        ": Expected all tensors to be on the same device, but found at least two devices, sim:", device, " and cpu!");
    for (auto& v : given)
      if (device < 0 && v.isDevice()) device = or_current(v.toDevice().index());
    device = or_current(device);
  }

  c10::IValue on_host(size_t i) {
    const auto& v = given[i];
    if (v.isDevice()) return c10::Device(c10::kCPU);
    if (facts.is_generator[i]) return cpu_generator(v.isNone() ? default_generator(device) : v.toGenerator());
    return with_tensors(v, [&](const at::Tensor& t) { return on_host(t, facts.writes[i]); });
  }
  at::Tensor on_host(const at::Tensor& t, bool written) {
    if (!t.defined()) return t;
    if (!on_sim(t)) {  // a number, which the host may change as soon as this returns
      if (t.dim() > 0 || !t.is_cpu()) return t;
      auto copy = t.detach().clone();
      copy.unsafeGetTensorImpl()->set_wrapped_number(t.unsafeGetTensorImpl()->is_wrapped_number());
      return copy;
    }
    auto view = cpu_view(t);
    if (written && t.numel() == 0) growing.emplace_back(t, view);
    tensors.push_back(t);
    if (t.numel()) pointers.push_back(t.data_ptr());
    return view;
  }

  // Whether the host has to know values to go on, on CUDA too.
  bool waits_for_data() const {
    if (name() == "aten::repeat_interleave") return given.back().isNone();  // no output_size
    if (!facts.mixes) return facts.depends_on_data;
    if (name().find("index_put") != std::string::npos && !has_host_tensor && given[2].toTensor().numel() == 1)
      return false;  // a mask and one value: no indices are made
    bool mask = false;
    each_tensor(given[1], [&](const at::Tensor& t) {
      mask |= t.defined() && (t.scalar_type() == c10::kBool || t.scalar_type() == c10::kByte);
    });
    return mask || has_host_tensor;
  }

  c10::IValue argument_of(const c10::Argument& result) const {
    const auto& schema = op.schema();
    for (size_t i = 0; i < given.size(); i++) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias && *alias == *result.alias_info()) return given[i];
    }
    TORCH_CHECK(false, "sim: alias of ", name());
  }
};

// The CPU's kernel, or what stands for it.
static void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (auto kernel = facts_of(op).kernel)
    kernel(op, stack);
  else
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

// A tensor of the device over memory that `t`, a result of the host's, shares with an argument; undefined if none.
static at::Tensor as_view(const Call& call, const at::Tensor& t) {
  for (auto& original : call.tensors) {
    if (!original.numel()) continue;
    const auto from = (const char*)original.storage().data(), at = (const char*)t.const_data_ptr();
    if (at < from || at >= from + original.storage().nbytes()) continue;
    auto view = at::detail::make_tensor<at::TensorImpl>(
        at::TensorImpl::VIEW, c10::Storage(original.storage()), original.key_set(), t.dtype());
    const auto offset = (at - from) / (int64_t)t.itemsize();
    view.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), offset);
    return view;
  }
  return {};
}
static void fill(const Call& call, const at::Tensor& device, const at::Tensor& host) {
  if (!host.numel()) return;
  call.stream->synchronize();  // what another thread queued on this memory before it freed it
  Access access({device.data_ptr()});
  std::memcpy(device.data_ptr(), host.const_data_ptr(), Memory(host).bytes());
}
static at::Tensor new_tensor(int device, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype) {
  Unpoisoned memory;
  return at::empty_strided(sizes, strides, at::TensorOptions(dtype).device(c10::Device(kType, device)));
}
// A tensor of the device that holds what `t`, of the host, holds.
static at::Tensor to_device(const Call& call, const at::Tensor& t) {
  auto out = new_tensor(call.device, t.sizes(), t.strides(), t.scalar_type());
  fill(call, out, t);
  return out;
}

// ---------------------------------------------------------------- results that are known before they are computed
// On CUDA the host goes on as soon as a kernel is queued, with results whose shapes it has worked out. Here they are
// remembered: an operator waits when it is called with such arguments for the first time, and is queued from then on.
struct Result {
  bool defined = false;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  explicit Result(const at::Tensor& t) : defined(t.defined()) {
    if (!defined) return;
    sizes = t.sizes().vec();
    strides = t.strides().vec();
    dtype = t.scalar_type();
  }
};
using Results = std::vector<std::vector<Result>>;  // of each result the tensor, or those of the list

static std::shared_mutex g_results_mutex;
static auto& g_results = *new std::unordered_map<std::string, Results>();
static const bool kRunAhead = env_int("SIM_RUN_AHEAD", 1);

struct Key {  // all that the shapes of results can depend on
  std::string bytes;
  bool complete = true;
  explicit Key(const Call& call) {
    add((int64_t)&call.op.schema());
    add((int64_t)c10::typeMetaToScalarType(at::get_default_dtype()));
    for (size_t i = 0; i < call.arguments.size(); i++)
      add(call.arguments[i], call.facts.is_number[i] && !call.tensors.empty());
  }
  void add(int64_t n) { bytes.append((const char*)&n, sizeof(n)); }
  void add(c10::IntArrayRef all) {
    add((int64_t)all.size());
    for (auto n : all) add(n);
  }
  void add(const at::Tensor& t) {
    add((int64_t)t.defined());
    if (!t.defined()) return;
    add((int64_t)t.scalar_type());
    add((int64_t)t.unsafeGetTensorImpl()->is_wrapped_number());
    add(t.sizes());
    add(t.strides());
  }
  void add(const c10::IValue& v, bool only_kind) {  // of a number that is computed with its type decides, not its value
    const int64_t kind = v.isTensor() ? 0 : v.isList() ? 1 : v.isInt() ? 2 : v.isDouble() ? 3 : v.isBool() ? 4
        : v.isString() ? 5 : v.isNone() ? 6 : v.isDevice() ? 7 : v.isComplexDouble() ? 8 : -1;
    add(kind);
    complete &= kind >= 0;
    if (v.isTensor()) {
      add(v.toTensor());
    } else if (v.isList()) {
      add((int64_t)v.toListRef().size());
      for (const auto& element : v.toListRef()) add(element, only_kind);
    } else if (v.isString()) {
      add((int64_t)v.toStringRef().size());
      bytes += v.toStringRef();
    } else if (v.isBool()) {
      add((int64_t)v.toBool());
    } else if (v.isInt() && !only_kind) {
      add(v.toInt());
    } else if (v.isDouble() && !only_kind) {
      const double number = v.toDouble();
      bytes.append((const char*)&number, sizeof(number));
    } else if (v.isComplexDouble()) {
      complete &= only_kind;
    }
  }
};
static bool is_predictable(const Call& call) {
  return kRunAhead && call.facts.only_new && !call.facts.random && !call.has_host_tensor && call.growing.empty() &&
      !call.waits_for_data();
}
static void remember(const Call& call, const torch::jit::Stack& made) {
  const Key key(call);
  if (!key.complete) return;
  Results results;
  for (auto& v : made) {
    auto& list = results.emplace_back();
    each_tensor(v, [&](const at::Tensor& t) { list.emplace_back(t); });
  }
  std::unique_lock<std::shared_mutex> lock(g_results_mutex);
  g_results.emplace(key.bytes, std::move(results));
}

static void run_ahead(const Call& call, const Results& known, torch::jit::Stack* stack) {
  std::vector<std::optional<Memory>> memory;
  auto pointers = call.pointers;
  auto make = [&](const Result& result) -> at::Tensor {
    if (!result.defined) {
      memory.emplace_back();
      return {};
    }
    auto t = new_tensor(call.device, result.sizes, result.strides, result.dtype);
    pointers.push_back(memory.emplace_back(t)->pointer);
    return t;
  };
  const auto& returns = call.op.schema().returns();
  for (size_t r = 0; r < returns.size(); r++) {
    if (returns[r].type()->kind() != c10::TypeKind::ListType) {
      stack->push_back(make(known[r].at(0)));
      continue;
    }
    c10::List<at::Tensor> list;
    for (auto& result : known[r]) list.push_back(make(result));
    stack->push_back(list);
  }
  call.stream->enqueue([op = call.op, arguments = call.arguments, pointers, memory] {
    Access access(pointers);
    torch::jit::Stack made(arguments);
    compute(op, &made);
    auto target = memory.begin();
    auto deliver = [&](const at::Tensor& t) {
      const auto& to = *target++;
      TORCH_CHECK(
          t.defined() == to.has_value() &&
              (!to || (t.sizes() == to->sizes && t.strides() == to->strides && t.scalar_type() == to->dtype)),
          "sim: a result of ", op.schema().name(), " is not of the shape it had before with such arguments");
      if (to && t.numel()) std::memcpy(to->pointer, t.const_data_ptr(), to->bytes());
    };
    for (auto& v : made) each_tensor(v, deliver);
  });
}

// ---------------------------------------------------------------- the ways to run an operator
static void push_arguments_as_results(const Call& call, torch::jit::Stack* stack) {
  for (auto& result : call.op.schema().returns()) stack->push_back(call.argument_of(result));
}

static void run_in_place(const Call& call, torch::jit::Stack* stack) {
  call.stream->enqueue([op = call.op, arguments = call.arguments, pointers = call.pointers] {
    Access access(pointers);
    torch::jit::Stack s(arguments);
    compute(op, &s);
  });
  push_arguments_as_results(call, stack);
}

// Looks at no value, so it waits for nothing. False if a result turns out to be a copy.
static bool run_as_view(const Call& call, torch::jit::Stack* stack) {
  torch::jit::Stack made(call.arguments);
  compute(call.op, &made);
  bool all = true;
  auto view = [&](const at::Tensor& t) {
    if (!t.defined() || !t.numel()) return t.defined() ? to_device(call, t) : t;
    auto result = as_view(call, t);
    all &= result.defined();
    return result;
  };
  for (auto& v : made) v = with_tensors(v, view);
  if (all) stack->insert(stack->end(), made.begin(), made.end());
  return all;
}

// While it lives the host's random numbers are the device's, for kernels that are given no generator.
struct RandomNumbers {
  at::Generator host = at::detail::getDefaultCPUGenerator(), device;
  at::Tensor before = host.get_state();
  explicit RandomNumbers(int index) : device(cpu_generator(default_generator(index))) {
    host.set_state(device.get_state());
  }
  ~RandomNumbers() {
    device.set_state(host.get_state());
    host.set_state(before);
  }
};

static void run_and_wait(const Call& call, torch::jit::Stack* stack) {
  auto wait = call.waits_for_data() ? std::make_unique<HostWait>(call.name())
                                    : std::make_unique<HostWait>();
  call.stream->synchronize();
  torch::jit::Stack made(call.arguments);
  {
    const auto& own = call.facts.is_generator;
    const bool takes_generator = std::find(own.begin(), own.end(), true) != own.end();
    auto numbers = call.facts.random && !takes_generator ? std::make_unique<RandomNumbers>(call.device) : nullptr;
    Access access(call.pointers);
    compute(call.op, &made);
  }
  for (auto& [device, host] : call.growing) {
    Unpoisoned memory;
    device.resize_(host.sizes());
    device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
    fill(call, device, host);
  }
  if (is_predictable(call)) remember(call, made);
  const auto& returns = call.op.schema().returns();
  for (size_t r = 0; r < returns.size(); r++) {
    const auto* alias = returns[r].alias_info();
    if (alias && alias->isWrite()) {
      stack->push_back(call.argument_of(returns[r]));
      continue;
    }
    stack->push_back(with_tensors(made[r], [&](const at::Tensor& t) {
      if (!t.defined() || !t.is_cpu()) return t;
      auto view = alias && t.numel() ? as_view(call, t) : at::Tensor();
      return view.defined() ? view : to_device(call, t);
    }));
  }
}

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, stack);
  c10::DeviceGuard guard(c10::Device(kType, (c10::DeviceIndex)call.device));
  const auto& facts = call.facts;
  if (facts.may_view && run_as_view(call, stack)) return;
  if (facts.in_place && call.growing.empty() && !facts.random && !call.waits_for_data())
    return run_in_place(call, stack);
  if (is_predictable(call)) {
    const Key key(call);
    std::shared_lock<std::shared_mutex> lock(g_results_mutex);
    const auto it = g_results.find(key.bytes);
    if (key.complete && it != g_results.end()) return run_ahead(call, it->second, stack);
  }
  run_and_wait(call, stack);
}

// What a compiler traces with: tensors of a Python subclass, or of functionalisation, that have no memory.
static bool has_memory(const at::Tensor& t) {
  return !t.unsafeGetTensorImpl()->is_python_dispatch() && !t.key_set().has(c10::DispatchKey::Functionalize);
}

// Which attention torch takes is asked of the CPU as well; it depends on shapes and settings, not on values.
// A graph gets torch's own formula, which any device can run.
static int64_t choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  if (!has_memory(query)) return static_cast<int64_t>(at::SDPBackend::math);
  auto like = [](const at::Tensor& t) {
    auto view = cpu_view(t);
    return t.requires_grad() ? view.requires_grad_() : view;
  };
  auto host_mask = mask && mask->defined() ? std::optional<at::Tensor>(like(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(
      like(query), like(key), like(value), host_mask, dropout, is_causal, scale, enable_gqa);
}
}  // namespace sim
namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose_attention)
}
namespace sim {

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", compatible);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// Operators that would be decomposed take the CPU's own kernel too, so that results are the CPU's bit by bit.
// So do those that the CPU decomposes itself where CUDA has a kernel, and what torch leaves to a device.
static const std::set<std::string> kLeft{
    "aten::_grouped_mm", "aten::convolution_overrideable", "aten::convolution_backward_overrideable"};
void register_cpu_kernels() {
  static auto& library =
      *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  using c10::DispatchKey;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || name.name.find("pin") != std::string::npos) continue;
    auto op = dispatcher.findOp(name);
    auto has = [&](DispatchKey key) { return op->hasKernelForDispatchKey(key); };
    if (!op || !op->hasSchema() || has(DispatchKey::PrivateUse1)) continue;
    if (!has(DispatchKey::CPU) && !kLeft.count(name.name)) continue;
    if (!has(DispatchKey::CompositeImplicitAutograd) && !has(DispatchKey::CompositeExplicitAutograd) &&
        !has(DispatchKey::CompositeExplicitAutogradNonFunctional))
      continue;
    const auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (std::getenv("SIM_VERBOSE")) std::fprintf(stderr, "sim: %s\n", full.c_str());
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}
}  // namespace sim

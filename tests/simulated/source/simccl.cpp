// Collectives with NCCL's rules. They run in order on a stream of their own; Work::wait() orders the current stream after
// them and does not block the host. Gloo moves the bytes.
//
// NCCL checks nothing: where ranks do not all call the same collective, or one has died, its kernels spin until a watchdog
// finds the time-out passed. Here each rank first tells the others what it is about to do. Where that differs, or gloo
// fails, the stream stands still until the time-out, and then happens what TORCH_NCCL_ASYNC_ERROR_HANDLING says, as with
// NCCL; only the message knows more.
#include "collectives.h"
#include <ATen/Functions.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <atomic>
#include <cstring>
#include <iostream>

namespace sim {
namespace {
using c10d::OpType;
using c10d::ReduceOp;
using Clock = std::chrono::steady_clock;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

const char* kind_of(OpType type) {
  switch (type) {
    case OpType::ALLREDUCE: case OpType::ALLREDUCE_COALESCED: return "all_reduce";
    case OpType::ALLGATHER: case OpType::_ALLGATHER_BASE: case OpType::ALLGATHER_COALESCED: return "all_gather";
    case OpType::REDUCE_SCATTER: case OpType::_REDUCE_SCATTER_BASE: return "reduce_scatter";
    case OpType::ALLTOALL: case OpType::ALLTOALL_BASE: return "all_to_all";
    case OpType::BROADCAST: return "broadcast";
    case OpType::REDUCE: return "reduce";
    case OpType::GATHER: return "gather";
    case OpType::SCATTER: return "scatter";
    case OpType::SEND: return "send";
    case OpType::RECV: return "recv";
    default: return "barrier";
  }
}
int64_t elements_of(const Tensors& tensors) {
  int64_t sum = 0;
  for (auto& t : tensors) sum += t.numel();
  return sum;
}

// ---------------------------------------------------------------- what a rank is about to do
struct Announcement {  // of fixed size, compared byte by byte; -1 where ranks may differ, or there is none
  char kind[16] = {}, dtype[16] = {};
  int64_t elements = -1, root = -1, reduction = -1;

  Announcement(OpType type, const Tensors& tensors, int64_t elements) : elements(elements) {
    std::strncpy(kind, kind_of(type), sizeof(kind) - 1);
    if (!tensors.empty()) std::strncpy(dtype, c10::toString(tensors[0].scalar_type()), sizeof(dtype) - 1);
  }
  bool operator==(const Announcement& other) const { return std::memcmp(this, &other, sizeof(*this)) == 0; }
  std::string text() const {
    std::string said = kind;
    if (elements >= 0) said += " of " + std::to_string(elements);
    if (dtype[0]) said += std::string(" ") + dtype;
    if (root >= 0) said += ", root " + std::to_string(root);
    if (reduction >= 0) said += ", reduction " + std::to_string(reduction);
    return said;
  }
};

// ---------------------------------------------------------------- a group, and one collective of it
struct Group {  // shared by the backend and what it has queued
  c10::intrusive_ptr<c10d::Backend> gloo;
  const int rank, size;
  std::atomic<int64_t> timeout_ms;
  std::atomic<bool> aborted{false};
  std::mutex mutex;
  std::string failure;  // of the first collective that failed; no other runs after it

  Group(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, int64_t timeout_ms)
      : gloo(std::move(gloo)), rank(rank), size(size), timeout_ms(timeout_ms) {}

  void check() {
    std::lock_guard<std::mutex> lock(mutex);
    TORCH_CHECK_WITH(DistBackendError, failure.empty(), failure);
    TORCH_CHECK_WITH(DistBackendError, !aborted, "NCCL communicator was aborted on rank ", rank, ".");
  }
};

struct Collective {
  std::shared_ptr<Group> group;
  Announcement said;
  int64_t number;  // in its group; -1 for what two ranks do between them
  std::function<WorkPtr()> move_bytes;
  Clock::time_point start = Clock::now();

  Clock::time_point deadline() const { return start + std::chrono::milliseconds(group->timeout_ms.load()); }

  void run() const {
    group->check();
    try {
      if (number >= 0) compare();
      move_bytes()->wait();
    } catch (const std::exception& error) {
      stand_still(error.what());
    }
  }

  // What all ranks are about to do must be one thing.
  void compare() const {
    auto bytes = at::empty({group->size, (int64_t)sizeof(Announcement)}, at::kByte);
    auto mine = at::empty({1, (int64_t)sizeof(Announcement)}, at::kByte);
    std::memcpy(mine.data_ptr(), &said, sizeof(said));
    wait(group->gloo->_allgather_base(bytes, mine, {}));
    auto all = (const Announcement*)bytes.const_data_ptr();
    for (int rank = 0; rank < group->size; rank++)
      TORCH_CHECK(
          all[rank] == said, "ranks differ in collective ", number, " of their group: rank ", group->rank, " calls ",
          said.text(), "; rank ", rank, " calls ", all[rank].text());
  }

  void wait(const WorkPtr& work) const {
    while (!work->isCompleted()) {
      TORCH_CHECK(!group->aborted, "aborted");
      TORCH_CHECK(Clock::now() < deadline(), "not every rank has called it");
      try {
        work->wait(std::chrono::milliseconds(50));
      } catch (const std::exception&) {  // this wait's own time-out, or an error of the work, raised below
      }
    }
    work->wait();
  }

  [[noreturn]] void stand_still(const std::string& what) const {
    const auto why = what.substr(0, what.find('\n'));
    std::cerr << "simccl: rank " << group->rank << " stands still until the time-out: " << why << std::endl;
    while (Clock::now() < deadline() && !group->aborted) nap(10000);
    if (group->aborted) group->check();
    const auto ran = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count();
    const auto message = c10::str(
        "[Rank ", group->rank, "] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=", number,
        ", OpType=", said.text(), ", Timeout(ms)=", group->timeout_ms.load(), ") ran for ", ran,
        " milliseconds before timing out. What NCCL would not say: ", why);
    const auto handling = env_int("TORCH_NCCL_ASYNC_ERROR_HANDLING", 3);
    while (handling == 0) nap(1000000);  // nobody watches
    if (handling != 2) {
      std::cerr << message << "\nTo avoid data inconsistency, we are taking the entire process down." << std::endl;
      std::abort();
    }
    std::lock_guard<std::mutex> lock(group->mutex);
    if (group->failure.empty()) group->failure = message;
    C10_THROW_ERROR(DistBackendError, message);
  }
};

// ---------------------------------------------------------------- c10d's interface
struct Work final : c10d::Work {
  struct Outcome {
    std::mutex mutex;
    std::exception_ptr error;
  };
  std::shared_ptr<Outcome> outcome = std::make_shared<Outcome>();
  EventPtr end;
  c10::intrusive_ptr<c10::ivalue::Future> future;  // of the outputs: whoever waits for it orders a stream
  Stream* stream;
  const bool blocks_host;
  Tensors kept, outputs;

  Work(int rank, OpType type, Stream* stream)
      : c10d::Work(rank, type), stream(stream), blocks_host(type == OpType::BARRIER) {}
  ~Work() override {  // nobody has waited: the memory must outlive the collective all the same
    if (end && !end->query() && !kept.empty()) stream->enqueue([kept = std::move(kept)] {});
  }
  std::exception_ptr exception() const override {
    std::lock_guard<std::mutex> lock(outcome->mutex);
    return outcome->error;
  }
  bool isCompleted() override { return end->query(); }
  bool isSuccess() const override { return end->query() && !exception(); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  void synchronize() override {
    current_stream(stream->device)->wait_for(end);
    kept.clear();
  }
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (blocks_host) {
      HostWait wait("barrier");
      current_stream(stream->device)->synchronize();
    }
    if (auto error = exception()) std::rethrow_exception(error);
    return true;
  }
};

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}
Tensors views(const Tensors& tensors) {
  Tensors all;
  for (auto& t : tensors) all.push_back(cpu_view(t));
  return all;
}
std::vector<Tensors> views(const std::vector<Tensors>& lists) {
  std::vector<Tensors> all;
  for (auto& list : lists) all.push_back(views(list));
  return all;
}

// Complete at once, as NCCL's are: it holds an event of the stream, which streams that use the value wait for.
c10::intrusive_ptr<c10::ivalue::Future> done_on(Stream* stream, int device, const Tensors& outputs) {
  const c10::Device here(kType, (c10::DeviceIndex)device);
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{here});
  c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, here, stream->id));
  future->markCompleted(at::IValue(outputs));
  return future;
}

struct Backend final : c10d::Backend {
  struct Settings final : c10d::Backend::Options {
    explicit Settings(int64_t ms) : c10d::Backend::Options("simccl", std::chrono::milliseconds(ms)) {}
  };
  static inline std::atomic<int64_t> next_stream{1000};
  const int64_t stream_id = next_stream++;
  std::shared_ptr<Group> group;
  uint64_t calls = 0;  // of collectives

  Backend(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, int64_t timeout_ms)
      : c10d::Backend(rank, size), group(std::make_shared<Group>(std::move(gloo), rank, size, timeout_ms)) {}

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return c10::make_intrusive<Settings>(group->timeout_ms.load());
  }
  void setTimeout(std::chrono::milliseconds timeout) override { group->timeout_ms = timeout.count(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls; }
  void abort() override { group->aborted = true; }

  // Queues `move_bytes`, which may use host views of the tensors, behind what the current stream has to do.
  WorkPtr submit(OpType type, Announcement said, Tensors in, Tensors out, std::function<WorkPtr()> move_bytes) {
    group->check();
    auto all = in;
    all.insert(all.end(), out.begin(), out.end());
    std::vector<const void*> pointers;
    int device = current_device();
    for (auto& t : all) {
      TORCH_CHECK(on_sim(t), "No backend type associated with device type ", t.device().type());
      TORCH_CHECK(t.is_contiguous(), "Tensors must be contiguous");
      device = t.device().index();
      if (t.numel()) pointers.push_back(t.data_ptr());
    }

    auto stream = stream_of(device, stream_id);
    stream->wait_for(current_stream(device)->record());
    auto work = c10::make_intrusive<Work>(getRank(), type, stream);
    const bool between_two = type == OpType::SEND || type == OpType::RECV;
    Collective collective{group, said, between_two ? -1 : (int64_t)calls++, std::move(move_bytes)};
    static const int64_t delay = env_int("SIM_COMM_DELAY_US", 0);
    stream->enqueue([collective, pointers, outcome = work->outcome] {
      try {
        nap(delay);
        Access access(pointers);
        collective.run();
      } catch (...) {
        std::lock_guard<std::mutex> lock(outcome->mutex);
        outcome->error = std::current_exception();
        throw;
      }
    });
    work->end = stream->record();
    work->kept = std::move(all);
    work->outputs = std::move(out);
    work->future = done_on(stream, device, work->outputs);
    return work;
  }
  static Announcement say(OpType type, const Tensors& tensors) { return {type, tensors, elements_of(tensors)}; }
  static Announcement say(OpType type, const Tensors& tensors, const ReduceOp& reduction) {
    auto said = say(type, tensors);
    said.reduction = (int64_t)(ReduceOp::RedOpType)reduction;
    return said;
  }
  static Announcement say_root(Announcement said, int64_t root) {
    said.root = root;
    return said;
  }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    constexpr auto type = OpType::BROADCAST;
    auto said = say_root(say(type, t), o.rootRank);
    return submit(type, said, t, t, [g = group, v = views(t), o]() mutable { return g->gloo->broadcast(v, o); });
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    constexpr auto type = OpType::ALLREDUCE;
    auto said = say(type, t, o.reduceOp);
    return submit(type, said, t, t, [g = group, v = views(t), o]() mutable { return g->gloo->allreduce(v, o); });
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    constexpr auto type = OpType::ALLREDUCE_COALESCED;
    auto said = say(type, t, o.reduceOp);
    return submit(type, said, t, t, [g = group, v = views(t), o]() mutable { return g->gloo->allreduce_coalesced(v, o); });
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    constexpr auto type = OpType::REDUCE;
    auto said = say_root(say(type, t, o.reduceOp), o.rootRank);
    return submit(type, said, t, t, [g = group, v = views(t), o]() mutable { return g->gloo->reduce(v, o); });
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    constexpr auto type = OpType::ALLGATHER;
    auto said = say(type, flat(out));  // parts may be of different sizes
    return submit(type, said, in, flat(out), [g = group, a = views(out), b = views(in), o]() mutable {
      return g->gloo->allgather(a, b, o);
    });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    constexpr auto type = OpType::_ALLGATHER_BASE;
    return submit(type, say(type, {out}), {in}, {out}, [g = group, a = cpu_view(out), b = cpu_view(in), o]() mutable {
      return g->gloo->_allgather_base(a, b, o);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    constexpr auto type = OpType::ALLGATHER_COALESCED;
    return submit(type, say(type, out), in, out, [g = group, a = views(out), b = views(in), o]() mutable {
      return g->gloo->allgather_into_tensor_coalesced(a, b, o);
    });
  }
  WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& o) override {
    constexpr auto type = OpType::GATHER;
    auto said = say_root(say(type, in), o.rootRank);
    return submit(type, said, in, flat(out), [g = group, a = views(out), b = views(in), o]() mutable {
      return g->gloo->gather(a, b, o);
    });
  }
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& o) override {
    constexpr auto type = OpType::SCATTER;
    auto said = say_root(say(type, out), o.rootRank);
    return submit(type, said, flat(in), out, [g = group, a = views(out), b = views(in), o]() mutable {
      return g->gloo->scatter(a, b, o);
    });
  }
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& o) override {
    constexpr auto type = OpType::REDUCE_SCATTER;
    auto said = say(type, flat(in), o.reduceOp);
    return submit(type, said, flat(in), out, [g = group, a = views(out), b = views(in), o]() mutable {
      return g->gloo->reduce_scatter(a, b, o);
    });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    constexpr auto type = OpType::_REDUCE_SCATTER_BASE;
    auto said = say(type, {in}, o.reduceOp);
    return submit(type, said, {in}, {out}, [g = group, a = cpu_view(out), b = cpu_view(in), o]() mutable {
      return g->gloo->_reduce_scatter_base(a, b, o);
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    constexpr auto type = OpType::_REDUCE_SCATTER_BASE;
    auto said = say(type, in, o.reduceOp);
    return submit(type, said, in, out, [g = group, a = views(out), b = views(in), o]() mutable {
      return g->gloo->reduce_scatter_tensor_coalesced(a, b, o);
    });
  }
  WorkPtr alltoall_base(
      at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& o) override {
    constexpr auto type = OpType::ALLTOALL_BASE;
    Announcement said{type, {in}, -1};
    auto move = [g = group, a = cpu_view(out), b = cpu_view(in), out_sizes, in_sizes, o]() mutable {
      return g->gloo->alltoall_base(a, b, out_sizes, in_sizes, o);
    };
    return submit(type, said, {in}, {out}, move);
  }
  WorkPtr send(Tensors& t, int to, int tag) override {
    constexpr auto type = OpType::SEND;
    return submit(type, say(type, t), t, {}, [g = group, v = views(t), to, tag]() mutable { return g->gloo->send(v, to, tag); });
  }
  WorkPtr recv(Tensors& t, int from, int tag) override {
    constexpr auto type = OpType::RECV;
    return submit(type, say(type, t), {}, t, [g = group, v = views(t), from, tag]() mutable { return g->gloo->recv(v, from, tag); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    constexpr auto type = OpType::BARRIER;
    return submit(type, {type, {}, -1}, {}, {}, [g = group, o]() mutable { return g->gloo->barrier(o); });
  }
};
}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(
    c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, int64_t timeout_ms) {
  return c10::make_intrusive<Backend>(std::move(gloo), rank, size, timeout_ms);
}
}  // namespace sim

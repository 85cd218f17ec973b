// A process group with NCCL's manners over gloo's bytes: a collective is launched on a stream, and waiting for it orders the
// current stream and leaves the host alone.
//
// Note [Order within a group]
// Ranks must agree on the order of a group's collectives, and gloo's calls block a thread. So each is delayed until the one
// before it is over, on whatever stream. No program is promised that order: clocks do not count it.
#include "process_group.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tensors.h"

namespace sim {

namespace {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;
using Run = std::function<void(c10d::Backend&)>;

std::mutex counting;
std::map<std::string, int64_t> counts;
int groups = 0;

struct SimWork final : Work {
  SimWork(EventPtr event, Stream* stream, bool holds_host, Tensors outputs, Tensors kept)
      : Work(-1, c10d::OpType::UNKNOWN), event_(std::move(event)), stream_(stream), holds_host_(holds_host),
        outputs_(std::move(outputs)), kept_(std::move(kept)) {}
  bool isCompleted() override {
    std::lock_guard lock(event_->mutex);
    return event_->done;
  }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    wait_on_stream(current_stream(stream_->device), event_);
    kept_.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (holds_host_) wait_on_host(event_, "barrier");
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    c10::Device device(kType, (c10::DeviceIndex)stream_->device);
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    Stream* before = exchange_stream(stream_);  // a wait for the future is a wait for the stream of the collective
    future->markCompleted(c10::IValue(outputs_));
    exchange_stream(before);
    return future;
  }
  EventPtr event_;
  Stream* stream_;
  bool holds_host_;
  Tensors outputs_;
  Tensors kept_;  // as NCCL's: what an asynchronous collective uses is not freed before a stream has waited
};

Tensors cpu(const Tensors& tensors) {
  Tensors made;
  for (auto& t : tensors) made.push_back(on_cpu(t));
  return made;
}

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors made;
  for (auto& list : lists) made.insert(made.end(), list.begin(), list.end());
  return made;
}

std::vector<Tensors> cpu(const std::vector<Tensors>& lists) {
  std::vector<Tensors> made;
  for (auto& list : lists) made.push_back(cpu(list));
  return made;
}

void gather_single(c10d::Backend& gloo, at::Tensor out, at::Tensor in, int size) {
  TORCH_CHECK(out.numel() == in.numel() * size, "simccl: all_gather: ", in.numel(), " elements of ", size, " ranks do not fill ",
      out.numel());
  std::vector<Tensors> outs{Tensors(out.view({size, -1}).unbind())};
  Tensors ins{in.clone().view({-1})};  // NCCL allows the input to be a part of the output
  gloo.allgather(outs, ins)->wait();
}

// Terms are added in the order of ranks, and rounded as they are, so that what comes out can be compared bit by bit: gloo adds in
// an order that depends on sizes. NCCL, too, rounds after each term; in which order it adds is not promised.
void add_up(const at::Tensor& terms, c10d::ReduceOp op, at::Tensor out) {
  at::Tensor total = terms[0].clone();
  for (int64_t rank = 1; rank < terms.size(0); rank++) total.add_(terms[rank]);
  if (op == c10d::ReduceOp::AVG) total.div_(terms.size(0));
  out.copy_(total.view(out.sizes()));
}

bool is_sum(c10d::ReduceOp op) { return op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG; }

void sum(c10d::Backend& gloo, at::Tensor tensor, c10d::ReduceOp op, int size) {
  if (is_sum(op)) {
    auto flat = tensor.as_strided({tensor.numel()}, {1});  // as it lies
    auto terms = at::empty({size, tensor.numel()}, tensor.options());
    gather_single(gloo, terms, flat, size);
    return add_up(terms, op, flat);
  }
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  bool narrow = tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf;  // which gloo may not know
  at::Tensor wide = narrow ? tensor.to(at::kFloat) : tensor;
  Tensors list{wide};
  gloo.allreduce(list, options)->wait();
  if (narrow) tensor.copy_(wide);
}

void scatter_sum(c10d::Backend& gloo, at::Tensor out, at::Tensor in, c10d::ReduceOp op, int rank, int size) {
  TORCH_CHECK(in.numel() == out.numel() * size, "simccl: reduce_scatter: ", in.numel(), " elements are not ", size, " times ",
      out.numel());
  if (is_sum(op)) {
    auto terms = at::empty({size, out.numel()}, in.options());
    if (!in.numel()) return;
    auto to = terms.view({-1}).view(at::kByte), from = in.view({-1}).view(at::kByte);
    std::vector<int64_t> evenly;
    gloo.alltoall_base(to, from, evenly, evenly, {})->wait();
    return add_up(terms, op, out);
  }
  auto whole = in.clone().view({size, -1});
  sum(gloo, whole, op, size);
  out.view({-1}).copy_(whole[rank]);
}

class SimGroup final : public c10d::Backend {
 public:
  SimGroup(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) : Backend(rank, size), gloo_(std::move(gloo)) {
    std::lock_guard lock(counting);
    number_ = groups++;
  }

  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalesces_ = true; }
  WorkPtr endCoalescing() override {
    coalesces_ = false;
    return std::move(last_work_);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return go("all_reduce", {}, tensors, o.asyncOp, [on = cpu(tensors), o, n = size_](auto& gloo) {
      for (auto& t : on) sum(gloo, t, o.reduceOp, n);
    });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    return go("all_reduce_coalesced", {}, tensors, o.asyncOp, [on = cpu(tensors), o, n = size_](auto& gloo) {
      for (auto& t : on) sum(gloo, t, o.reduceOp, n);
    });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return go("broadcast", {}, tensors, o.asyncOp,
        [on = cpu(tensors), o](auto& gloo) mutable { gloo.broadcast(on, o)->wait(); });
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    auto one = at::zeros({1}, at::TensorOptions().device(c10::Device(kType, (c10::DeviceIndex)current_device())));
    return go("barrier", {}, {one}, false,
        [on = on_cpu(one), n = size_](auto& gloo) { sum(gloo, on, c10d::ReduceOp::SUM, n); }, true);
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    return go("all_gather", {in}, {out}, o.asyncOp,
        [a = on_cpu(out), b = on_cpu(in), n = size_](auto& gloo) { gather_single(gloo, a, b, n); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    return go("all_gather_coalesced", ins, outs, o.asyncOp, [a = cpu(outs), b = cpu(ins), n = size_](auto& gloo) {
      for (size_t i = 0; i < a.size(); i++) gather_single(gloo, a[i], b[i], n);
    });
  }
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    return go("all_gather_list", ins, flat(outs), o.asyncOp,
        [a = cpu(outs), b = cpu(ins)](auto& gloo) mutable { gloo.allgather(a, b)->wait(); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return go("reduce_scatter", {in}, {out}, o.asyncOp, [a = on_cpu(out), b = on_cpu(in), o, r = rank_, n = size_](auto& gloo) {
      scatter_sum(gloo, a, b, o.reduceOp, r, n);
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& o) override {
    return go("reduce_scatter_coalesced", ins, outs, o.asyncOp,
        [a = cpu(outs), b = cpu(ins), o, r = rank_, n = size_](auto& gloo) {
          for (size_t i = 0; i < a.size(); i++) scatter_sum(gloo, a[i], b[i], o.reduceOp, r, n);
        });
  }
  WorkPtr scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& o) override {
    return go("scatter", flat(ins), outs, o.asyncOp,
        [a = cpu(outs), b = cpu(ins), o](auto& gloo) mutable { gloo.scatter(a, b, o)->wait(); });
  }
  WorkPtr gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& o) override {
    return go("gather", ins, flat(outs), o.asyncOp,
        [a = cpu(outs), b = cpu(ins), o](auto& gloo) mutable { gloo.gather(a, b, o)->wait(); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    return go("reduce", {}, tensors, o.asyncOp, [on = cpu(tensors), o, r = rank_, n = size_](auto& gloo) {
      for (auto& t : on) {
        auto all = t.clone();
        sum(gloo, all, o.reduceOp, n);
        if (r == o.rootRank) t.copy_(all);
      }
    });
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& outs, std::vector<int64_t>& ins,
      const c10d::AllToAllOptions& o) override {
    return go("all_to_all", {in}, {out}, o.asyncOp, [a = on_cpu(out), b = on_cpu(in), outs, ins, o](auto& gloo) mutable {
      gloo.alltoall_base(a, b, outs, ins, o)->wait();
    });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return go("send", tensors, {}, true, [a = cpu(tensors), to, tag](auto& gloo) mutable { gloo.send(a, to, tag)->wait(); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return go("recv", {}, tensors, true, [a = cpu(tensors), from, tag](auto& gloo) mutable { gloo.recv(a, from, tag)->wait(); });
  }

 private:
  WorkPtr go(const char* name, Tensors reads, Tensors writes, bool async, Run run, bool holds_host = false) {
    const auto first = writes.empty() ? reads.at(0) : writes.at(0);
    std::vector<Access> accesses;
    for (auto* list : {&reads, &writes})
      for (auto& t : *list) {
        TORCH_CHECK(on_device(t), "simccl: ", name, " got a tensor on ", t.device());
        TORCH_CHECK(t.device() == first.device(), "simccl: ", name, " got tensors on several devices");
        TORCH_CHECK(t.is_contiguous(t.suggest_memory_format()), "simccl: tensors must be contiguous");
        TORCH_CHECK(!t.is_complex(), "simccl: ", name, " got complex numbers");
        accesses.push_back(access_of(t, list == &writes));
      }
    int device = first.device().index();
    Stream* caller = current_stream(device);
    Stream* stream = caller;
    if (async) {
      auto& own = own_[device];
      if (!own) own = new_stream(device, "the stream of group " + std::to_string(number_));
      stream = own;
      wait_on_stream(stream, record(caller));
    }
    if (last_) delay_stream(stream, last_);  // see Note [Order within a group]
    {
      std::lock_guard lock(counting);
      counts[name]++;
    }
    launch(stream, std::string(name) + " of group " + std::to_string(number_), accesses,
        [gloo = gloo_, run = std::move(run)] { run(*gloo); });
    last_ = record(stream);
    Tensors outputs = writes, kept;
    if (async) {
      kept = std::move(reads);
      kept.insert(kept.end(), writes.begin(), writes.end());
    }
    auto work = c10::make_intrusive<SimWork>(last_, stream, holds_host, std::move(outputs), std::move(kept));
    if (coalesces_) last_work_ = work;  // otherwise the group would keep the memory of its last collective
    return async || holds_host ? work : nullptr;  // NCCL, too, has no work for what the current stream does itself
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  Stream* own_[kDevices] = {};
  EventPtr last_;
  WorkPtr last_work_;
  bool coalesces_ = false;
  int number_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> over_gloo(const c10::intrusive_ptr<c10d::Backend>& gloo, int rank, int size) {
  return c10::make_intrusive<SimGroup>(gloo, rank, size);
}

std::map<std::string, int64_t> collectives() {
  std::lock_guard lock(counting);
  return counts;
}

void clear_collectives() {
  std::lock_guard lock(counting);
  counts.clear();
}

}  // namespace sim

// Random numbers of the simulated accelerator, which depend on the order in which the host launches and on no stream's pace.
//
// Note [Random numbers]
// As CUDA's, a generator is a seed and an offset. A launch takes both along and moves the offset on at once, so the state can be
// read and set between launches without a wait. What it draws comes from a CPU generator of its own, seeded with the two.
#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/GeneratorImpl.h>
#include <torch/library.h>

#include <cstring>

#include "tensors.h"

namespace sim {

namespace {

constexpr uint64_t kFirstSeed = 67280421310721, kOffsetOfLaunch = 4;  // DTensor counts in fours, too

uint64_t scramble(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device)
      : GeneratorImpl(c10::Device(kType, (c10::DeviceIndex)device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.is_cpu() && state.numel() == 2 * sizeof(uint64_t) && state.itemsize() == 1, "sim: no state of a generator");
    const auto* bytes = (const char*)state.data();
    std::memcpy(&seed_, bytes, sizeof seed_);
    std::memcpy(&offset_, bytes + sizeof seed_, sizeof offset_);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({2 * sizeof(uint64_t)}, at::TensorOptions(at::kByte).device(at::kCPU));
    auto* bytes = (char*)state.mutable_data_ptr();
    std::memcpy(bytes, &seed_, sizeof seed_);
    std::memcpy(bytes + sizeof seed_, &offset_, sizeof offset_);
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->seed_ = seed_;
    made->offset_ = offset_;
    return made;
  }
  uint64_t next() {
    std::lock_guard lock(mutex_);
    uint64_t drawn = scramble(seed_ ^ scramble(offset_));
    offset_ += kOffsetOfLaunch;
    return drawn;
  }

  uint64_t seed_ = kFirstSeed, offset_ = 0;
};

// The CPU's draws from the CPU's generator, whatever it is given.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (p == 0 || (train && !*train)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  auto kept = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(kept).mul_(p == 1 ? 0.0 : 1 / (1 - p)), kept};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("native_dropout", TORCH_FN(native_dropout)); }

}  // namespace

at::Generator new_generator(int device) { return at::make_generator<Generator>(device < 0 ? current_device() : device); }

const at::Generator& default_generator(int device) {
  static const auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int d = 0; d < kDevices; d++) made->push_back(new_generator(d));
    return made;
  }();
  return all->at(device < 0 ? current_device() : device);
}

at::Generator generator_of_one_launch(const std::optional<at::Generator>& drawn_from, int device) {
  const auto& own = drawn_from && drawn_from->defined() ? *drawn_from : default_generator(device);
  TORCH_CHECK(own.device().type() == kType, "sim: expected a generator of the device, but found one of '", own.device(), "'");
  return at::detail::createCPUGenerator(((Generator*)own.unsafeGetGeneratorImpl())->next());
}

}  // namespace sim

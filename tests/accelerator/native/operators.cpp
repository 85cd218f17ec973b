// Every operator of the simulated accelerator: its meta kernel says now what comes out, its CPU kernel computes it later, on the
// stream that was current. Knows no operator but those that make and move tensors.
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <cstring>

#include "kernels.h"
#include "outcomes.h"
#include "random.h"
#include "tensors.h"

namespace sim {

namespace {

std::mutex counting;
std::map<std::string, int64_t> on_host;

Stream* here() { return current_stream(current_device()); }

// ------------------------------------------------------------------------------------------------ making and viewing

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, c10::GetAllocator(kType), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kType),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}
at::Tensor view_as_real(const at::Tensor& self) { return at::native::view_as_real(self); }
at::Tensor view_as_complex(const at::Tensor& self) { return at::native::view_as_complex(self); }

void grow_storage(const at::Tensor& self) {
  size_t bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.element_size(), self.storage_offset());
  if (self.numel() && bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  if (self.sizes() == size && !format) return self;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != c10::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  grow_storage(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() == nullptr || (stride.empty() && !size.empty()))
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  impl->set_storage_offset(offset);
  grow_storage(self);
  return self;
}
at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  auto numel = (int64_t)(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {numel}, {1});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_nothing(at::Tensor& self) {
  auto* allocator = c10::GetAllocator(kType);
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator->allocate(0), allocator, true);
  return set_storage(self, none, 0, {0}, {1});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  c10::impl::VirtualGuardImpl(kType).recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

// ---------------------------------------------------------------------------------------------------------- copies

// Poison is all ones, which no computation makes: NaN that is computed has zeros in its mantissa, unless it comes from poison.
bool is_poisoned(const at::Tensor& tensor) {
  if (!tensor.is_floating_point() || !tensor.is_contiguous()) return false;
  auto* bytes = (const unsigned char*)tensor.const_data_ptr();
  const size_t item = tensor.element_size();
  unsigned char ones[16];
  std::memset(ones, 0xFF, sizeof ones);
  for (int64_t i = 0; i < tensor.numel(); i++)
    if (!std::memcmp(bytes + i * item, ones, item)) return true;
  return false;
}

void copy_to_host(const at::Tensor& source, const at::Tensor& target, const std::string& what) {
  auto from = on_cpu(source), to = target;
  auto access = access_of(source, false);
  auto* stream = here();
  bool looks = settings.detects && settings.poisons;
  auto writers = looks ? writers_of(access) : std::vector<Site>();
  auto label = looks ? label_here(what) : nullptr;
  launch(stream, what, {access, access_of(target, true)}, [=, index = stream->index] {
    c10::InferenceMode any;  // the target may be a tensor of inference mode
    to.copy_(from);
    if (looks && is_poisoned(to)) report_poison(writers, {label, index});
  });
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (!dst.numel()) return dst;
  c10::OptionalDeviceGuard guard(on_device(dst) ? dst.device() : self.device());
  auto source = self.expand(dst.sizes());
  if (on_device(self) && on_device(dst)) {
    auto from = on_cpu(source), to = on_cpu(dst);
    launch(here(), "copy_", {access_of(source, false), access_of(dst, true)}, [=] { to.copy_(from); });
  } else if (on_device(dst)) {
    bool pinned = source.is_pinned();
    auto from = pinned ? source : source.clone(), to = on_cpu(dst);
    launch(here(), "copy to device", {access_of(from, false), access_of(dst, true)}, [=] { to.copy_(from); });
    if (!non_blocking) wait_on_host(here(), "copy to device");
  } else {
    copy_to_host(source, dst, "copy to host");
    if (!non_blocking || !dst.is_pinned()) wait_on_host(here(), "copy to host");
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  c10::OptionalDeviceGuard guard(self.device());
  auto value = at::empty_strided(self.sizes(), self.strides(), self.options().device(at::kCPU));
  copy_to_host(self, value, "item");
  wait_on_host(here(), "item");
  return at::_local_scalar_dense(value);
}

// ---------------------------------------------------------------------------------------------------------- kernels

bool is_generator(const c10::Argument& argument) {
  const auto optional = argument.type()->cast<c10::OptionalType>();
  return (optional ? optional->getElementType() : argument.type())->kind() == c10::TypeKind::GeneratorType;
}

// What an operator draws from in place of the device's generator. One of the host is drawn from as it is.
c10::IValue generator_for(const c10::IValue& value, int device) {
  auto given = value.toOptional<at::Generator>();
  return given && given->device().is_cpu() ? value : c10::IValue(generator_of_one_launch(given, device));
}

// Operators without a meta kernel, and those that return numbers: the host waits, as it does for `nonzero` on a real device.
void run_on_host(const c10::OperatorHandle& op, Stack* stack, const std::string& why) {
  auto name = c10::toString(op.operator_name());
  {
    std::lock_guard lock(counting);
    on_host[name + " (" + why.substr(0, why.find('\n')) + ")"]++;
  }
  wait_on_host(here(), "operator " + name);
  const auto& schema = op.schema().arguments();
  for (size_t i = 0; i < schema.size(); i++)
    if (auto& value = torch::jit::peek(*stack, i, schema.size()); is_generator(schema[i])) value = generator_for(value, current_device());
  at::native::cpu_fallback(op, stack);
}

std::optional<c10::Device> device_of_arguments(const std::string& name, const Stack& stack, size_t begin) {
  std::optional<c10::Device> device;
  for (size_t i = begin; i < stack.size(); i++)
    each_tensor(stack[i], [&](const at::Tensor& t) {
      if (on_device(t)) {
        TORCH_CHECK(!device || *device == t.device(), "sim: ", name, " got tensors on ", *device, " and ", t.device());
        device = t.device();
        return;
      }
      bool may_be_elsewhere = t.dim() == 0 || name.rfind("index", 0) == 0 || name.rfind("_index", 0) == 0;
      TORCH_CHECK(may_be_elsewhere || !device, "sim: ", name, " got tensors on ", t.device(), " and on ", *device);
    });
  return device;
}

// The argument that an operator writes to and returns.
const c10::IValue& returned_argument(const c10::FunctionSchema& schema, size_t result, const Stack& stack, size_t begin) {
  const auto* alias = schema.returns()[result].alias_info();
  TORCH_CHECK(alias->isWrite(), "sim: ", schema, " makes a view and is not there yet");
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other && other->isWrite() && other->beforeSets() == alias->beforeSets()) return stack[begin + i];
  }
  TORCH_CHECK(false, "sim: nothing tells what ", schema, " returns");
}

// What the backward of a norm reads of its forward. CPU kernels keep it in the dtype of the layer; meta kernels say float, as
// accelerators have it, but that of group norms, for which it is done below.
struct Statistics {
  std::vector<size_t> places;  // among the arguments
  std::vector<size_t> like;    // arguments of the dtype that the kernel wants; the first that is there

  void cast(Stack& arguments) const {
    std::optional<c10::ScalarType> dtype;
    for (size_t i : like)
      each_tensor(arguments[i], [&](const at::Tensor& t) { dtype = dtype.value_or(t.scalar_type()); });
    for (size_t i : places) arguments[i] = map_tensors(arguments[i], [&](const at::Tensor& t) { return t.to(*dtype); });
  }
};

const Statistics* statistics_of(const std::string& name) {
  static const std::map<std::string, Statistics> of_norms{
      {"native_batch_norm_backward", {{5, 6}, {2, 3, 4, 1}}},
      {"native_group_norm_backward", {{2, 3}, {4, 1}}},
      {"native_layer_norm_backward", {{3, 4}, {5, 1}}},
  };
  auto found = of_norms.find(name);
  return found == of_norms.end() ? nullptr : &found->second;
}

void run_operator(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  const std::string name = schema.name().substr(6);  // without "aten::"
  auto device = device_of_arguments(name, *stack, begin);
  c10::OptionalDeviceGuard guard(device);
  if (!device) return run_on_host(op, stack, "made of no tensor");

  std::shared_ptr<const Outcome> outcome;
  try {
    outcome = outcome_of(op, *stack, begin);
  } catch (const c10::NotImplementedError& error) {
    if (!schema.returns().empty()) return run_on_host(op, stack, error.what());
    outcome = std::make_shared<const Outcome>();  // without a result no shape is needed
  } catch (const std::exception& error) {
    return run_on_host(op, stack, error.what());
  }
  for (auto& result : outcome->results)
    if (result.kind == Outcome::Result::kOther) return run_on_host(op, stack, "returns no tensor");

  if (!outcome->resized.empty()) {
    std::vector<at::Tensor> tensors;
    for (size_t i = begin; i < stack->size(); i++) each_tensor((*stack)[i], [&](const at::Tensor& t) { tensors.push_back(t); });
    for (auto& [place, form] : outcome->resized) {
      tensors[place].unsafeGetTensorImpl()->set_sizes_and_strides(form.sizes, form.strides);
      grow_storage(tensors[place]);
    }
  }

  std::vector<Access> accesses;
  Stack arguments;
  bool draws_on_host = false;
  for (size_t i = 0; i < count; i++) {
    const auto& value = (*stack)[begin + i];
    const auto* alias = schema.arguments()[i].alias_info();
    each_tensor(value, [&](const at::Tensor& t) {
      if (on_device(t)) accesses.push_back(access_of(t, alias && alias->isWrite()));
    });
    if (value.isDevice()) {
      arguments.emplace_back(c10::Device(at::kCPU));
    } else if (is_generator(schema.arguments()[i])) {
      arguments.push_back(generator_for(value, device->index()));
      draws_on_host = value.isGenerator() && value.toGenerator().device().is_cpu();
    } else arguments.push_back(map_tensors(value, on_cpu));
  }

  Stack results;
  std::vector<std::pair<size_t, std::vector<at::Tensor>>> targets;  // by result: the memory of new tensors
  for (size_t r = 0; r < schema.returns().size(); r++) {
    if (schema.returns()[r].alias_info()) {
      results.push_back(returned_argument(schema, r, *stack, begin));
      continue;
    }
    targets.emplace_back(r, std::vector<at::Tensor>());
    auto& into = targets.back().second;
    std::vector<at::Tensor> fresh;
    for (auto& form : outcome->results[r].forms) {
      if (!form.defined) {
        fresh.emplace_back();
        continue;
      }
      auto dtype = r && name == "native_group_norm" && c10::isReducedFloatingType(form.dtype) ? at::kFloat : form.dtype;
      fresh.push_back(at::empty_strided(form.sizes, form.strides, at::TensorOptions().dtype(dtype).device(*device)));
      accesses.push_back(access_of(fresh.back(), true));
      into.push_back(on_cpu(fresh.back()));
    }
    switch (outcome->results[r].kind) {
      case Outcome::Result::kTensor: results.emplace_back(fresh[0]); break;
      case Outcome::Result::kTensors: results.emplace_back(fresh); break;
      default: results.emplace_back();
    }
  }

  const Statistics* statistics = statistics_of(name);
  launch(here(), name, accesses, [op, statistics, arguments = std::move(arguments), targets = std::move(targets)]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    if (statistics) statistics->cast(arguments);
    call_kernel(op, arguments);
    for (auto& [r, into] : targets) {
      size_t next = 0;
      each_tensor(arguments[r], [&](const at::Tensor& t) {
        auto& to = into[next++];
        if (t.numel() || !to.numel()) to.copy_(t);  // CPU kernels of a norm in evaluation keep no statistics, which are not read
      });
    }
  });
  if (draws_on_host) wait_on_host(here(), "");  // before the host draws from it again; CUDA takes no such generator
  torch::jit::drop(*stack, count);
  for (auto& result : results) stack->push_back(std::move(result));
}

// torch does not know how a foreign device convolves: as the host does.
void convolution(const c10::OperatorHandle&, c10::DispatchKeySet keys, Stack* stack) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run_operator(op, keys, stack);
}
void convolution_backward(const c10::OperatorHandle&, c10::DispatchKeySet keys, Stack* stack) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  auto own = torch::jit::last(*stack, 10).vec();  // all but the sizes of the bias
  int64_t channels = own[0].toTensor().size(1);
  torch::jit::drop(*stack, 10);
  for (size_t i = 0; i < own.size(); i++) {
    if (i == 3) stack->emplace_back(std::vector<int64_t>{channels});
    stack->push_back(own[i]);
  }
  run_operator(op, keys, stack);
}

// For a device that it does not know torch makes these of other operators, whose results have the dtype of the weights: then what
// backward is given fits no kernel.
constexpr const char* kNorms[] = {"native_layer_norm", "native_group_norm"};

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("unfold", TORCH_FN(unfold));
  m.impl("view_as_real", TORCH_FN(view_as_real));
  m.impl("view_as_complex", TORCH_FN(view_as_complex));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  for (const char* norm : kNorms) m.impl(norm, torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace

std::map<std::string, int64_t> operators_run_on_host() {
  std::lock_guard lock(counting);
  return on_host;
}

}  // namespace sim

// What comes out of operators: the same operator on meta tensors says so. Knows no stream, and no memory.
//
// Note [Remembered outcomes]
// Meta kernels of many operators are written in Python, and cost more than all the rest of a launch. What they say depends on how
// arguments look, not on what is in tensors: sizes, strides and dtypes, which of them are the same tensor, and all numbers. So it is
// asked once for each look.
#include "outcomes.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <string>
#include <unordered_map>

namespace sim {

namespace {

bool is_number(const at::Tensor& tensor) { return !on_device(tensor) && tensor.dim() == 0; }  // which any device takes

// How arguments look, as bytes.
class Look {
 public:
  std::string bytes;
  bool known = true;  // whether all arguments are of kinds that bytes can tell apart

  explicit Look(const c10::OperatorHandle& op) { put(&op.schema(), c10::get_default_dtype_as_scalartype()); }
  void add(const c10::IValue& value) {
    if (value.isTensor()) add(value.toTensor());
    else if (value.isNone() || value.isGenerator()) put('0');
    else if (value.isInt()) put('i', value.toInt());
    else if (value.isDouble()) put('d', value.toDouble());
    else if (value.isBool()) put('b', value.toBool());
    else if (value.isComplexDouble()) put('c', value.toComplexDouble());
    else if (value.isDevice()) put('v');
    else if (value.isString()) add(value.toStringRef());
    else if (value.isList()) add(value.toListRef());
    else known = false;
  }

 private:
  std::vector<const c10::TensorImpl*> seen_;

  template <class... T>
  void put(const T&... values) {
    (bytes.append((const char*)&values, sizeof values), ...);
  }
  void add(c10::IntArrayRef numbers) {
    put(numbers.size());
    for (auto number : numbers) put(number);
  }
  void add(const std::string& text) {
    put('s', text.size());
    bytes += text;
  }
  void add(c10::ArrayRef<c10::IValue> values) {
    put('l', values.size());
    for (auto& value : values) add(value);
  }
  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return put('u');
    auto* impl = tensor.unsafeGetTensorImpl();
    auto found = std::find(seen_.begin(), seen_.end(), impl);
    put(is_number(tensor) ? 'n' : 't', found - seen_.begin());
    if (found != seen_.end()) return;
    seen_.push_back(impl);
    if (tensor.layout() != at::kStrided) return void(known = false);
    put(tensor.scalar_type(), impl->is_wrapped_number(), tensor.is_conj(), tensor.is_neg());
    add(tensor.sizes());
    add(tensor.strides());
  }
};

Form form_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {false};
  return {true, tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec()};
}

Outcome::Result result_of(const c10::IValue& value) {
  if (value.isNone()) return {Outcome::Result::kNothing};
  if (value.isTensor()) return {Outcome::Result::kTensor, {form_of(value.toTensor())}};
  if (!value.isTensorList()) return {Outcome::Result::kOther};
  Outcome::Result result{Outcome::Result::kTensors};
  for (const at::Tensor& t : value.toTensorVector()) result.forms.push_back(form_of(t));
  return result;
}

std::shared_ptr<const Outcome> ask(const c10::OperatorHandle& op, const Stack& stack, size_t begin) {
  Stack meta;
  std::unordered_map<c10::TensorImpl*, at::Tensor> metas;
  auto to_meta = [&](const at::Tensor& t) {
    if (is_number(t)) return t;
    auto& made = metas[t.unsafeGetTensorImpl()];
    if (!made.defined())
      made = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta).pinned_memory(std::nullopt));
    return made;
  };
  for (size_t i = begin; i < stack.size(); i++) {
    if (stack[i].isDevice()) meta.emplace_back(c10::Device(at::kMeta));
    else if (stack[i].isGenerator()) meta.emplace_back();
    else meta.push_back(map_tensors(stack[i], to_meta));
  }
  op.callBoxed(&meta);

  auto outcome = std::make_shared<Outcome>();
  for (auto& value : meta) outcome->results.push_back(result_of(value));
  size_t next = 0;
  for (size_t i = begin; i < stack.size(); i++)
    each_tensor(stack[i], [&](const at::Tensor& t) {
      size_t place = next++;
      if (!on_device(t)) return;
      auto& made = metas.at(t.unsafeGetTensorImpl());
      if (t.sizes() != made.sizes() || t.strides() != made.strides()) outcome->resized.push_back({place, form_of(made)});
    });
  return outcome;
}

std::mutex remembering;
auto& remembered = *new std::unordered_map<std::string, std::shared_ptr<const Outcome>>;
constexpr size_t kRemembered = 100'000;

}  // namespace

std::shared_ptr<const Outcome> outcome_of(const c10::OperatorHandle& op, const Stack& stack, size_t begin) {
  Look look(op);
  for (size_t i = begin; i < stack.size(); i++) look.add(stack[i]);
  if (!look.known) return ask(op, stack, begin);
  {
    std::lock_guard lock(remembering);
    auto found = remembered.find(look.bytes);
    if (found != remembered.end()) return found->second;
  }
  auto outcome = ask(op, stack, begin);  // without the lock: it may run Python
  std::lock_guard lock(remembering);
  if (remembered.size() >= kRemembered) remembered.clear();
  return remembered[look.bytes] = outcome;
}

}  // namespace sim

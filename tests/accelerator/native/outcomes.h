// What comes out of operators, and in which form.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <vector>

#include "tensors.h"

namespace sim {

using torch::jit::Stack;

template <class F>
c10::IValue map_tensors(const c10::IValue& value, const F& f) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    return tensor.defined() ? c10::IValue(f(tensor)) : value;
  }
  if (value.isTensorList()) {
    std::vector<at::Tensor> made;
    for (const at::Tensor& t : value.toTensorVector()) made.push_back(t.defined() ? f(t) : t);
    return c10::IValue(made);
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (auto t : value.toOptionalTensorVector()) made.push_back(t && t->defined() ? std::optional(f(*t)) : t);
    return c10::IValue(made);
  }
  return value;
}

template <class F>
void each_tensor(const c10::IValue& value, const F& f) {
  map_tensors(value, [&](const at::Tensor& t) {
    f(t);
    return t;
  });
}

struct Form {
  bool defined;
  c10::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
};

struct Outcome {
  struct Result {
    enum Kind { kNothing, kTensor, kTensors, kOther } kind;
    std::vector<Form> forms;
  };
  struct Resized {
    size_t place;  // among the tensors of the arguments
    Form form;
  };
  std::vector<Result> results;
  std::vector<Resized> resized;  // arguments that the operator gives another shape, as `out=` may be
};

// What the operator's meta kernel says of the arguments on `stack` from `begin` on: asked once, and remembered for all that look
// the same. Raises what the kernel raises.
std::shared_ptr<const Outcome> outcome_of(const c10::OperatorHandle& op, const Stack& stack, size_t begin);

}  // namespace sim

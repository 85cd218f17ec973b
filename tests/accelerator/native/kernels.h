// How kernels of the CPU are called.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace sim {

// The CPU's kernel, computing each element alike wherever in a tensor it lies. See Note [Rounding].
void call_kernel(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace sim

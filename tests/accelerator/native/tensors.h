// Tensors of the simulated accelerator, as streams and the detector see them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "streams.h"

namespace sim {

constexpr auto kType = c10::DeviceType::PrivateUse1;

bool on_device(const at::Tensor& tensor);
// All bytes between the first and the last element: what lies between them counts, too.
Access access_of(const at::Tensor& tensor, bool write);
// The same memory, seen as a CPU tensor: what kernels compute on. Raises where the memory is gone.
at::Tensor on_cpu(const at::Tensor& tensor);
void resize_storage(const c10::Storage& storage, size_t bytes);
std::map<std::string, int64_t> operators_run_on_host();

}  // namespace sim

// The backend `simccl`, for the bindings.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {

c10::intrusive_ptr<c10d::Backend> over_gloo(const c10::intrusive_ptr<c10d::Backend>& gloo, int rank, int size);
std::map<std::string, int64_t> collectives();
void clear_collectives();

}  // namespace sim

// How a kernel of the CPU is called on behalf of the device. Knows no stream.
//
// Note [Rounding]
// The CPU's kernels compute whole vectors in one way and the elements that are left over in another. Fused optimizers, and adding a
// multiple in half precision, round the two otherwise in the last bit; accelerators compute each element alike. So these get
// tensors that are filled up to whole vectors.
#include "kernels.h"

#include <ATen/ops/zeros.h>

#include "outcomes.h"

namespace sim {

namespace {

using Tensors = std::vector<at::Tensor>;

constexpr int64_t kElements = 64;  // no vector has more

bool starts_with(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }

bool is_half(const at::Tensor& tensor) { return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16; }

at::Tensor filled_up(const at::Tensor& tensor) {
  int64_t count = tensor.numel();
  auto made = at::zeros({(count + kElements - 1) / kElements * kElements}, tensor.options());
  made.narrow(0, 0, count).copy_(tensor.reshape({-1}));
  return made;
}

at::Tensor cut_off(const at::Tensor& tensor, const at::Tensor& like) {
  if (!like.numel()) return tensor;
  return tensor.narrow(0, 0, like.numel()).view(like.sizes());
}

// Tensors that go through a kernel together, by their place in lists; a lone tensor is a list of one. Nothing: there are some that
// kernels would run on others, or none to fill up.
std::vector<Tensors> rows_of(const torch::jit::Stack& stack, bool in_lists) {
  std::vector<Tensors> rows;
  for (auto& value : stack) {
    Tensors column;
    if (value.isTensorList()) column = value.toTensorVector();
    else if (!in_lists && value.isTensor() && value.toTensor().defined()) column = {value.toTensor()};
    if (rows.size() < column.size()) rows.resize(column.size());
    for (size_t i = 0; i < column.size(); i++) rows[i].push_back(column[i]);
  }
  return rows;
}

bool fits(const std::vector<Tensors>& rows) {
  for (auto& row : rows)
    for (auto& tensor : row)
      if (!tensor.is_contiguous() || (tensor.dim() && tensor.sizes() != row[0].sizes())) return false;
  return !rows.empty();
}

}  // namespace

void call_kernel(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto& name = op.schema().name();
  const bool fused = starts_with(name, "aten::_fused_adam") || starts_with(name, "aten::_fused_sgd") ||
      starts_with(name, "aten::_fused_adagrad");
  const bool listed = fused || starts_with(name, "aten::_foreach_add") || starts_with(name, "aten::_foreach_sub");
  const bool adds = name == "aten::add" || name == "aten::add_" || name == "aten::sub" || name == "aten::sub_";
  if (!listed && !adds) return op.callBoxed(&stack);
  bool half = false;
  for (auto& value : stack)
    map_tensors(value, [&](const at::Tensor& t) {
      half |= is_half(t);
      return t;
    });
  const auto rows = fused || half ? rows_of(stack, listed) : std::vector<Tensors>();
  if (!fits(rows)) return op.callBoxed(&stack);

  const auto arguments = op.schema().arguments();
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  for (size_t i = 0; i < stack.size(); i++) {
    const auto* alias = arguments[i].alias_info();
    if (listed && (stack[i].isTensor() || arguments[i].name() == "state_steps")) continue;  // a number for all, a number for each
    stack[i] = map_tensors(stack[i], [&](const at::Tensor& t) {
      if (!t.dim() && !listed && rows[0][0].dim()) return t;
      if (!t.numel()) return t;
      auto made = filled_up(t);
      if (alias && alias->isWrite()) written.emplace_back(t, made);
      return made;
    });
  }
  op.callBoxed(&stack);
  for (auto& [target, made] : written) target.copy_(cut_off(made, target));
  for (auto& value : stack) {
    size_t row = 0;
    value = map_tensors(value, [&](const at::Tensor& t) { return cut_off(t, rows.at(row++)[0]); });
  }
}

}  // namespace sim

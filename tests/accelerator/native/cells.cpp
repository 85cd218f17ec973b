// Cells of LSTM and GRU, which torch asks of a device as one operator each: made here of operators that it has. Gates lie in the
// order of torch: input, forget, cell, output; reset, update, new.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "tensors.h"

namespace sim {

namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const MaybeTensor& bias) { return bias && bias->defined() ? gates + *bias : gates; }

Tensor or_zeros(const MaybeTensor& tensor, const Tensor& like) {
  return tensor && tensor->defined() ? *tensor : at::zeros_like(like);
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& of_input, const Tensor& of_hidden, const Tensor& cell,
    const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  auto gates = (with_bias(of_input, input_bias) + with_bias(of_hidden, hidden_bias)).chunk(4, 1);
  auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), fresh = gates[2].tanh(), out = gates[3].sigmoid();
  auto next = forget * cell + in * fresh;
  return {out * next.tanh(), next, at::cat({in, forget, fresh, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const MaybeTensor& grad_hidden, const MaybeTensor& grad_cell,
    const Tensor& cell, const Tensor& next, const Tensor& workspace, bool has_bias) {
  auto gates = workspace.chunk(4, 1);
  auto &in = gates[0], &forget = gates[1], &fresh = gates[2], &out = gates[3];
  auto squashed = next.tanh(), grad = or_zeros(grad_hidden, cell);
  auto grad_next = or_zeros(grad_cell, cell) + grad * out * (1 - squashed * squashed);
  auto grad_gates = at::cat(
      {grad_next * fresh * in * (1 - in), grad_next * cell * forget * (1 - forget), grad_next * in * (1 - fresh * fresh),
          grad * squashed * out * (1 - out)},
      1);
  return {grad_gates, grad_next * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& of_input, const Tensor& of_hidden, const Tensor& hidden,
    const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  auto from_input = with_bias(of_input, input_bias).chunk(3, 1), from_hidden = with_bias(of_hidden, hidden_bias).chunk(3, 1);
  auto reset = (from_input[0] + from_hidden[0]).sigmoid(), update = (from_input[1] + from_hidden[1]).sigmoid();
  auto fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  return {(hidden - fresh) * update + fresh, at::cat({reset, update, fresh, hidden, from_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad, const Tensor& workspace, bool has_bias) {
  auto kept = workspace.chunk(5, 1);
  auto &reset = kept[0], &update = kept[1], &fresh = kept[2], &hidden = kept[3], &from_hidden = kept[4];
  auto grad_fresh = grad * (1 - update) * (1 - fresh * fresh);
  auto grad_update = grad * (hidden - fresh) * update * (1 - update);
  auto grad_reset = grad_fresh * from_hidden * reset * (1 - reset);
  auto grad_input = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  auto grad_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  return {grad_input, grad_hidden, grad * update, has_bias ? grad_input.sum(0) : Tensor(),
      has_bias ? grad_hidden.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  m.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
}

}  // namespace

}  // namespace sim

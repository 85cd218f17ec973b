"""`clip_grad_norm_` takes what torch's takes, and says what it cannot clip."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from composable import clip_grad_norm_, errors
from tests.helpers.refusals import refusal
from tests.helpers.world import Pool, current_device, need_devices


def _with_gradient(*values: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def test_a_tensor_alone_and_a_tensor_twice() -> None:
    assert clip_grad_norm_(_with_gradient(3.0, 4.0), 1.0) == 5
    parameter = _with_gradient(3.0, 4.0)
    assert clip_grad_norm_([parameter, parameter], 1.0) == 5, "one gradient counts once"
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))


def test_nothing_to_clip() -> None:
    for nothing in ([], nn.Identity(), [nn.Parameter(torch.ones(2))], nn.Parameter(torch.ones(0))):
        norm = clip_grad_norm_(nothing, 1.0, math.inf, error_if_nonfinite=True)
        assert norm == 0
        assert norm.shape == ()
    parameter = nn.Parameter(torch.ones(0))
    parameter.grad = torch.ones(0)
    assert clip_grad_norm_(parameter, 1.0, math.inf) == 0


def test_limits_that_torch_takes() -> None:
    parameter = _with_gradient(3.0, -4.0)
    assert clip_grad_norm_([parameter], float("inf"), "inf") == 4  # type: ignore[arg-type]
    assert parameter.grad.tolist() == [3.0, -4.0]  # type: ignore[union-attr]
    clip_grad_norm_([parameter], torch.tensor(0.5))  # type: ignore[arg-type]
    torch.testing.assert_close(parameter.grad, torch.tensor([0.3, -0.4]))
    clip_grad_norm_([parameter], 0)
    assert parameter.grad.tolist() == [0.0, -0.0]  # type: ignore[union-attr]


def test_messages() -> None:
    parameter: Any = _with_gradient(math.inf, 1.0)
    model, clip = nn.Linear(1, 1), clip_grad_norm_
    acts: list[Callable[[], object]] = [
        lambda: clip(parameter, "large"),  # type: ignore[arg-type]
        lambda: clip(parameter, None),  # type: ignore[arg-type]
        lambda: clip(parameter, -1.0),
        lambda: clip(parameter, 1.0, 0),
        lambda: clip(parameter, 1.0, -math.inf),
        lambda: clip(model.named_parameters(), 1.0),  # type: ignore[arg-type]
        lambda: clip(optim.SGD(model.parameters()), 1.0),  # type: ignore[arg-type]
        lambda: clip([model], 1.0),  # type: ignore[list-item]
        lambda: clip(parameter, 1.0, error_if_nonfinite=True),
    ]
    lines = [line for act in acts for line in textwrap.wrap(refusal(act), 110)]
    assert parameter.grad.tolist() == [math.inf, 1.0], "nothing was changed"
    assert_expected_inline(
        "\n".join(lines),
        """\
ClippingError: clip_grad_norm_: max_norm must be a number that is not negative, and norm_type must be a
positive number or inf, got 'large' and 2.0. To measure the norm only, pass max_norm=float('inf')
ClippingError: clip_grad_norm_: max_norm must be a number that is not negative, and norm_type must be a
positive number or inf, got None and 2.0. To measure the norm only, pass max_norm=float('inf')
ClippingError: clip_grad_norm_: max_norm must be a number that is not negative, and norm_type must be a
positive number or inf, got -1.0 and 2.0. To measure the norm only, pass max_norm=float('inf')
ClippingError: clip_grad_norm_: max_norm must be a number that is not negative, and norm_type must be a
positive number or inf, got 1.0 and 0. To measure the norm only, pass max_norm=float('inf')
ClippingError: clip_grad_norm_: max_norm must be a number that is not negative, and norm_type must be a
positive number or inf, got 1.0 and -inf. To measure the norm only, pass max_norm=float('inf')
ClippingError: clip_grad_norm_ takes a module, a tensor or an iterable of tensors, not a tuple. Pass the
model, or model.parameters()
ClippingError: clip_grad_norm_ takes a module, a tensor or an iterable of tensors, not a SGD. Pass the model,
or model.parameters()
ClippingError: clip_grad_norm_ takes a module, a tensor or an iterable of tensors, not a Linear. Pass the
model, or model.parameters()
NonFiniteError: clip_grad_norm_: the norm of order 2 over all gradients is inf. No gradient was changed. Skip
this step: optimizer.zero_grad(), then the next batch; with a GradScaler, pass error_if_nonfinite=False""",  # noqa: E501
    )
    assert issubclass(errors.ClippingError, ValueError)
    assert issubclass(errors.NonFiniteError, RuntimeError)


def _spread_otherwise() -> list[str]:
    mesh = init_device_mesh(current_device().type, (2,))
    zeros = torch.zeros(4, 2, device=current_device())
    parameter = nn.Parameter(distribute_tensor(zeros, mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(zeros, mesh, [Partial()], run_check=False)
    partial = nn.Parameter(DTensor.from_local(zeros, mesh, [Partial()], run_check=False))
    return [
        refusal(lambda: clip_grad_norm_(parameter, 1.0)),
        refusal(lambda: clip_grad_norm_(partial, 1.0)),
    ]


def test_gradients_that_are_not_spread_like_their_parameters_are_refused(
    pool: Pool, device: str
) -> None:
    need_devices(device, 2)
    one, other = pool.run(2, _spread_otherwise, device=device)
    assert one == other
    assert_expected_inline(
        "\n".join(line for text in one for line in textwrap.wrap(text, 110)),
        """\
ClippingError: clip_grad_norm_: a parameter of shape (4, 2) is a DTensor with placements (Replicate(),), but
its gradient is a DTensor with placements (Partial(sum),). Redistribute the gradient to the parameter's mesh
and placements first
ClippingError: clip_grad_norm_: of a parameter with placements (Partial(sum),), each rank holds a summand
only. Redistribute it first: p.redistribute(p.device_mesh, [Replicate()] * p.device_mesh.ndim)""",  # noqa: E501
    )

"""`clip_grad_norm_` takes what torch's takes."""

from __future__ import annotations

import math

import torch
from torch import nn

from composable import clip_grad_norm_


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

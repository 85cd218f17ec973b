"""Parameters of a class of torch's own tests, `TwoTensor`: its whole is of the class, too, around
the two tensors that were gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.two_tensor import TwoTensor

from tests.extensions.rows import Net
from tests.extensions.test_protocol import _alone, _batch, _sharded, _train
from tests.helpers.world import spmd

pytestmark = pytest.mark.beyond_sim("TwoTensor does not know the device")


def _first_form(self: TwoTensor, mesh: Any) -> Any:
    return (self.a, self.b), None


def _later_form(self: TwoTensor, mesh: Any, size: Any, stride: Any, module: Any, mp: Any) -> Any:
    return (self.a, self.b), None


def _post(aliases: set[bool]) -> Any:
    def post(
        self: TwoTensor, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        a, b = outputs
        if out is None:
            return TwoTensor(a, b).to(dtype), (a, b)
        aliases.add(a.untyped_storage().data_ptr() == out.a.untyped_storage().data_ptr())
        if a.dtype != dtype:
            out.a.copy_(a)
            out.b.copy_(b)
        return None

    return post


@contextmanager
def _extended(pre: Any) -> Iterator[set[bool]]:
    """`TwoTensor` has the protocol; yields whether its wholes were around the gathered memory."""
    aliases: set[bool] = set()
    with (
        mock.patch.object(TwoTensor, "fsdp_pre_all_gather", pre, create=True),
        mock.patch.object(TwoTensor, "fsdp_post_all_gather", _post(aliases), create=True),
    ):
        yield aliases


def _pairs(model: Net) -> Net:
    for linear in model.linears():
        weight = linear.weight.detach()
        linear.weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    return model


_FORMS: Final[dict[str, Any]] = {"first": _first_form, "later": _later_form}


@pytest.mark.parametrize("form", _FORMS)
@spmd(ranks=2)
def test_they_train_in_the_memory_that_was_gathered(form: str) -> None:
    for after in (True, False):
        with _extended(_FORMS[form]) as aliases:
            model = _sharded(_pairs(Net(hidden=8)), reshard_after_forward=after)
            torch.testing.assert_close(_train(model), _alone(Net(hidden=8)))
            assert aliases == {True}


@spmd(ranks=2)
def test_they_come_from_the_meta_device_and_compute_in_bf16() -> None:
    with _extended(_later_form) as aliases:
        with torch.device("meta"):
            model = _pairs(Net(hidden=8))
        _sharded(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.125)
        out = model(_batch(0))
        assert out.dtype == torch.bfloat16
        losses: list[Tensor] = _train(model)
        assert losses[2].a < losses[0].a  # type: ignore[attr-defined]
        assert False in aliases  # wholes are casts
        weight: Any = model.linears()[0].weight
        assert type(weight._local_tensor) is TwoTensor
        torch.testing.assert_close(weight._local_tensor.a, weight._local_tensor.b)

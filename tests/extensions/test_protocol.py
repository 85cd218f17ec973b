"""Parameters with FSDP2's extension protocol are sharded, gathered and rebuilt by their own
methods, and train as one process with the same emulation, and as FSDP2.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

from composable import (
    checkpoint,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    no_sync,
    remove,
)
from composable.comm.backends import comms_wrapped_by
from composable.comm.launch import Launch
from composable.engine.params.param_group import ShardedState
from composable.tensors import cloned
from composable.traversal import get_handles
from tests.extensions.rows import (
    Emulated,
    MeshOnly,
    Net,
    PaddingRows,
    Releasing,
    Rows,
    with_rows,
)
from tests.helpers.communicators import Around
from tests.helpers.world import spmd

pytestmark = pytest.mark.beyond_sim("FSDP2 does not know the device")


def _batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randn(4, 6, generator=generator)


def _train(
    model: nn.Module,
    steps: int = 3,
    *,
    batch: Callable[[int], Tensor] = _batch,
    held: Callable[[], AbstractContextManager[Any]] | None = None,
    fused: bool | None = None,
    finish: Callable[[], None] = lambda: None,
) -> list[Tensor]:
    """Losses. With `held`, each second backward is accumulated in it."""
    optimizer = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=0.02, fused=fused
    )
    losses = []
    for number in range(steps):
        with held() if held is not None and number % 2 == 0 else nullcontext():
            loss = model(batch(number)).float().square().mean()
            loss.backward()
        losses.append(loss.detach())
        if held is None or number % 2:
            finish()
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _alone(model: nn.Module, **options: Any) -> list[Tensor]:
    """Losses of a training whose gradients are averaged by hand."""

    def average() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    return _train(model, finish=average, **options)


def _sharded(model: Net, **options: Any) -> Net:
    return fully_shard(model, policy={nn.Sequential}, **options)


def _torchs(model: Net, **options: Any) -> Net:
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    fsdp.fully_shard(model, **options)
    return model


def _whole(model: nn.Module) -> dict[str, Tensor]:
    return full_state_dict(model, rank0_only=False)


@spmd(ranks=2)
def test_it_trains_as_one_process() -> None:
    kinds = (Rows, 8), (Rows, 5), (Rows, 1), (PaddingRows, 5), (MeshOnly, 5), (Releasing, 5)
    for kind, hidden in kinds:
        alone = Net(Emulated, hidden)
        model = _sharded(with_rows(Net(hidden=hidden), kind))
        for parameter in model.parameters():  # to which torch would add a warning
            assert not parameter._local_tensor.requires_grad  # type: ignore[attr-defined]
        fused = True if kind is PaddingRows else None
        torch.testing.assert_close(_train(model, fused=fused), _alone(alone, fused=fused))
        for name, whole in _whole(model).items():
            expected = alone.get_parameter(name).detach()
            torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)


class Unflattened(Rows):
    """Its `__tensor_unflatten__` is not torch's; FSDP2 never calls it."""

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, size: Any, stride: Any) -> Any:  # type: ignore[override]
        return cls(inner["values"])


class UnflattenedPlain(Rows):
    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return inner["values"]


@spmd(ranks=2)
def test_a_class_that_rebuilds_itself_unlike_torchs_trains_and_is_copied() -> None:
    for kind in (Unflattened, UnflattenedPlain):
        model = _sharded(with_rows(Net(hidden=5), kind))
        clone = copy.deepcopy(model)
        for each in (model, clone):
            assert type(each.linears()[0].weight._local_tensor) is kind  # type: ignore[union-attr]
        torch.testing.assert_close(_train(model), _alone(Net(Emulated, 5)))
        torch.testing.assert_close(_train(clone), _alone(Net(Emulated, 5)))
        remove(model, fully_shard)
        assert type(model.linears()[0].weight.data) is kind


class Noted(Rows):
    """Its `__tensor_unflatten__` forgets what `__tensor_flatten__` said."""

    note = 0

    def __tensor_flatten__(self) -> Any:
        return ["values"], self.note

    def new_zeros(self, *shape: Any) -> Any:
        made: Any = super().new_zeros(*shape)
        made.note = self.note
        return made


def test_a_copy_that_forgets_what_it_is_is_not_taken() -> None:
    tensor = Noted(torch.ones(2, 3))
    tensor.note = 1
    assert cloned(tensor).note == 1  # type: ignore[attr-defined]


_PROGRAMS: Final[dict[str, dict[str, Any]]] = {
    "reshard_after_forward=False": {"reshard_after_forward": False},
    "reshard_after_forward=True": {"reshard_after_forward": True},
    "mixed precision": {"mp_policy": fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "no_sync": {},
    "checkpoint": {},
    "frozen": {},
}


@pytest.mark.parametrize("name", _PROGRAMS)
@spmd(ranks=2)
def test_it_trains_as_fsdp2(name: str) -> None:
    options, frozen = _PROGRAMS[name], name == "frozen"
    model = _sharded(with_rows(Net(frozen=frozen)), **options)
    theirs = _torchs(with_rows(Net(frozen=frozen)), **options)
    if name == "no_sync":

        class Held:
            def __enter__(self) -> None:
                theirs.set_requires_gradient_sync(False)  # type: ignore[operator]

            def __exit__(self, *_: object) -> None:
                theirs.set_requires_gradient_sync(True)  # type: ignore[operator]

        found = _train(model, 4, held=lambda: no_sync(model))
        torch.testing.assert_close(found, _train(theirs, 4, held=Held))
        return
    if name == "checkpoint":
        for block in model.blocks:
            checkpoint(block)
        for block in theirs.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: torchs_checkpoint(  # type: ignore[method-assign]
                forward, x, use_reentrant=False
            )
    torch.testing.assert_close(_train(model), _train(theirs))


@spmd(ranks=4)
def test_hybrid_trains_as_one_process_and_tells_the_dimension_of_shards() -> None:
    for names in (("replicate", "shard"), None):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        Rows.asked = []
        model = _sharded(with_rows(Net(hidden=5)), mesh=mesh)
        assert all(reported[0].get_group() == mesh.get_group(1) for reported in Rows.asked)
        torch.testing.assert_close(_train(model), _alone(Net(Emulated, 5)))


@spmd(ranks=4)
def test_they_may_be_on_another_mesh_than_the_rest_of_their_unit() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = with_rows(Net(hidden=5))
    rows = {id(linear.weight) for linear in model.linears()}
    _sharded(
        model,
        mesh=mesh,
        dp_mesh_dims=SimpleNamespace(shard=("outer", "inner"), replicate=None),
        shard_placement_fn=lambda p: (Shard(0), mesh["inner"]) if id(p) in rows else None,
    )

    def batch(number: int) -> Tensor:  # the same in both groups over which they are sharded
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank() % 2)
        return torch.randn(4, 6, generator=generator)

    torch.testing.assert_close(_train(model, batch=batch), _alone(Net(Emulated, 5), batch=batch))


@spmd(ranks=2)
def test_the_protocol_is_given_the_parameter_and_fills_one_tensor() -> None:
    Rows.outs, Rows.asked = [], []
    model = _sharded(with_rows(Net(hidden=5)), reshard_after_forward=True)
    assert Rows.outs == [None] * 4  # once when annotated
    linear = model.linears()[0]
    assert Rows.asked[-1][1:] == ((6, 5), (5, 1), "Linear")
    assert isinstance(linear.weight, DTensor)
    assert type(linear.weight._local_tensor) is Rows
    groups = [group for block in model.blocks for group in get_handles(block)[0]]
    computes = [param.compute for group in groups for param in group.params]
    _train(model, 2)
    assert all(any(out is each for each in computes) for out in Rows.outs[4:])
    # Nothing is kept: neither what came, nor the tensor that was made of it.
    assert all(group.state is ShardedState.SHARDED for group in groups)
    assert not any(compute.untyped_storage().nbytes() for compute in computes)


def _bytes_at(model: Net) -> list[tuple[str, int, int]]:
    """In each forward and backward of a linear: bytes of what was gathered of its weight, and of
    the whole that was made of it.
    """
    seen: list[tuple[str, int, int]] = []

    def note(where: str, block: nn.Sequential, linear: nn.Linear) -> None:
        (group,) = get_handles(block)[0]
        # of each weight two, and then one of its bias
        first = 3 * [each for each in block if isinstance(each, nn.Linear)].index(linear)
        gathered = group.gather.buffers[first : first + 2]
        storages = [each.tensor.untyped_storage() for each in gathered]
        whole = linear.weight.untyped_storage()
        seen.append((where, sum(each.nbytes() for each in storages), whole.nbytes()))

    for block in model.blocks:
        for linear in block:  # type: ignore[union-attr]
            if isinstance(linear, nn.Linear):
                linear.register_forward_hook(lambda m, *_, b=block: note("forward", b, m))
                linear.register_full_backward_hook(lambda m, *_, b=block: note("backward", b, m))
    model(_batch(0).requires_grad_()).square().mean().backward()
    return seen


@spmd(ranks=2)
def test_what_was_gathered_is_freed_at_once_if_the_class_says_so() -> None:
    kept, freed = (_bytes_at(_sharded(with_rows(Net(hidden=5), k))) for k in (Rows, Releasing))
    assert [where for where, *_ in freed].count("backward") == 4
    for (where, gathered, whole), (same, released, made) in zip(kept, freed, strict=True):
        assert where == same
        assert gathered > released == 0
        assert whole == made > 0


@spmd(ranks=2)
def test_a_release_trains_as_fsdp2() -> None:
    for after in (True, False):
        model = _sharded(with_rows(Net(hidden=8), Releasing), reshard_after_forward=after)
        theirs = _torchs(with_rows(Net(hidden=8), Releasing), reshard_after_forward=after)
        torch.testing.assert_close(_train(model), _train(theirs), rtol=0, atol=0)


class _Counting(Around):
    def __init__(self, inner: Any, gathers: list[int]) -> None:
        super().__init__(inner)
        self._gathers = gathers

    def all_gather(self, pairs: Sequence[tuple[Tensor, Tensor]], launch: Launch) -> Any:
        self._gathers.append(sum(shard.nbytes for _, shard in pairs))
        return self._inner.all_gather(pairs, launch)


def gathered_bytes(make: Callable[[], nn.Module]) -> list[int]:
    """Bytes that each all-gather of a step sends."""
    found: list[int] = []
    with comms_wrapped_by(lambda comm: _Counting(comm, found)):
        model = make()
        found.clear()
        model(torch.randn(2, 256)).sum().backward()
    return found


@spmd(ranks=2)
def test_gathers_send_half_the_bytes_of_bfloat16_in_as_many_messages() -> None:
    def made() -> nn.Sequential:
        return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))

    def rows() -> nn.Module:
        model = made()
        for linear in model:
            linear.weight = nn.Parameter(Rows(linear.weight.detach()))
        return fully_shard(model, policy={nn.Linear}, mp_policy="bf16")

    found = gathered_bytes(rows)
    bf16 = gathered_bytes(lambda: fully_shard(made(), policy={nn.Linear}, mp_policy="bf16"))
    assert len(found) == len(bf16)
    assert sum(found) / sum(bf16) < 0.52


@spmd(ranks=2)
def test_methods_given_to_a_shard_after_the_annotation_are_used() -> None:
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = _sharded(Net(hidden=5))
        if device == "meta":  # local tensors change
            model.to_empty(device="cpu").load_state_dict(Net(hidden=5).state_dict())
        for linear in model.linears():
            local: Any = linear.weight._local_tensor  # type: ignore[union-attr]
            local.values = local
            local.fsdp_pre_all_gather = Rows.fsdp_pre_all_gather.__get__(local)
            local.fsdp_post_all_gather = Rows.fsdp_post_all_gather.__get__(local)
        torch.testing.assert_close(_train(model), _alone(Net(Emulated, 5)))


@spmd(ranks=2)
def test_a_model_of_the_meta_device_is_filled_later() -> None:
    with torch.device("meta"):
        model = with_rows(Net(hidden=5))
    _sharded(model)
    model.to_empty(device="cpu")
    model.load_state_dict(Net(hidden=5).state_dict())
    assert type(model.linears()[0].weight._local_tensor) is Rows  # type: ignore[union-attr]
    torch.testing.assert_close(_train(model), _alone(Net(Emulated, 5)))


@spmd(ranks=2)
def test_it_is_saved_loaded_copied_clipped_and_given_back() -> None:
    model = with_rows(Net(hidden=5))
    original = model.linears()[1].weight
    _sharded(model)
    _train(model, 1)
    whole, x = _whole(model), _batch(7)
    expected = model(x)
    expected.sum().backward()
    assert torch.isfinite(clip_grad_norm_(model.parameters(), 1.0))
    model.zero_grad()
    other = _sharded(with_rows(Net(hidden=5)))
    for assign in (False, True):
        for state in (model.state_dict(), whole):
            other.load_state_dict(state, assign=assign)
            torch.testing.assert_close(other(x), expected)
    torch.testing.assert_close(copy.deepcopy(model)(x), expected)
    plain = Net(Emulated, 5)
    plain.load_state_dict(whole)
    torch.testing.assert_close(plain(x), expected)
    weight = model.linears()[0].weight
    weight.mine = "kept"  # type: ignore[attr-defined]
    remove(model, fully_shard)
    given = model.linears()[0].weight
    assert type(given.data) is Rows
    assert given.mine == "kept"  # type: ignore[attr-defined]
    torch.testing.assert_close(given.data.values, whole["blocks.0.0.weight"])
    assert model.linears()[1].weight is original
    torch.testing.assert_close(original.data.values, whole["blocks.0.2.weight"])

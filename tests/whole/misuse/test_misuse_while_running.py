"""Uses of an annotated model that cannot work end at once with words that say what to do; those
that can, work.
"""

from __future__ import annotations

import copy
from functools import partialmethod

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.func import functional_call

from composable import describe, fully_shard, register_forward_method, replicate
from tests.helpers.battery.odd import Layer
from tests.helpers.compare import assert_mean_gradients
from tests.helpers.refusals import refusal, same_on_all
from tests.helpers.world import Pool, current_device, need_devices, spmd


class Model(nn.Module):
    """A model with more ways in than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Layer()
        self.decoder = Layer()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decoder(self.encoder(x)))

    def generate(self, x: Tensor, steps: int = 2) -> Tensor:
        for _ in range(steps):
            x = self.decoder(self.encoder(x))
        return self.head(x)

    def embed(self, x: Tensor) -> Tensor:
        return self.head.weight.sum() * x

    @staticmethod
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    @classmethod
    def named(cls, x: Tensor, *, name: str) -> tuple[Tensor, str]:
        return x, f"{name} of {cls.__name__}"

    scored = partialmethod(generate, steps=1)


def _model() -> Model:
    torch.manual_seed(0)
    return Model().double().to(current_device())


def _batch() -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(3, 6, generator=generator, dtype=torch.float64).to(current_device())


def _good_step(model: nn.Module) -> None:
    """A training step gives the gradients of the plain model."""
    model.zero_grad()
    plain = _model()
    for each in (plain, model):
        each(_batch()).square().mean().backward()
    assert_mean_gradients(plain, model)


# --- calls that are no forward ------------------------------------------------------------------


@pytest.mark.parametrize("policy", [False, True])
@spmd(ranks=2, everywhere=True)
def test_after_a_use_outside_of_a_call_which_dtensor_refuses_the_model_trains(policy: bool) -> None:
    model = fully_shard(_model(), policy={Layer} if policy else None)
    for use in (model.forward, model.generate, model.head):
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            use(_batch())
        _good_step(model)


class Reading(nn.Module):
    """Reads a parameter of a module that it calls, too."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) @ self.mix.weight[:, :6]


@spmd(ranks=2)
def test_a_parameter_read_outside_of_its_unit_is_named_with_a_cure_that_cures() -> None:
    def annotated(units: set[type[nn.Module]]) -> nn.Module:
        model = nn.Sequential(Layer(), Reading(), nn.Linear(6, 2)).double().to(current_device())
        return fully_shard(model, policy=units)

    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as caught:
        annotated({nn.Linear})(_batch())
    assert caught.value.__notes__ == [
        "a Reading in the forward of unit '(root)' may have read a parameter of another unit"
        " ('1.mix') outside of that unit's forward, where it is sharded. Then annotate the Reading"
        " as the unit in its place; with a policy, leave that one out"
    ]
    annotated({Reading})(_batch())


class Mixing(Reading):
    """Mixes a DTensor of the user's with plain tensors."""

    def forward(self, x: Tensor) -> Tensor:
        own = distribute_tensor(torch.ones(6), init_device_mesh(x.device.type, (2,)), [Replicate()])
        return self.mix(x) + own


@spmd(ranks=2)
def test_a_units_own_dtensor_is_not_blamed_on_the_unit() -> None:
    model = nn.Sequential(Layer(), Mixing(), nn.Linear(6, 2)).to(current_device())
    fully_shard(model, policy={Mixing})
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as caught:
        model(_batch().float())
    assert not hasattr(caught.value, "__notes__")


@spmd(ranks=[1, 2])
@pytest.mark.parametrize(
    "verb", ["fully_shard", "fully_shard by policy", "replicate", "replicate around shards"]
)
def test_registered_methods_compute_and_train_as_forward_does(verb: str) -> None:
    plain, model = _model(), _model()
    if verb == "replicate around shards":
        fully_shard(model.decoder)
    if verb.startswith("replicate"):
        replicate(model)
    else:
        fully_shard(model, policy={Layer} if verb == "fully_shard by policy" else None)
    register_forward_method(model, "generate")
    register_forward_method(model, "embed")
    x = _batch()
    with torch.no_grad():
        assert torch.equal(model.generate(x, steps=3), plain.generate(x, steps=3))
        assert torch.equal(model.embed(x), plain.embed(x))
    for each in (plain, model):
        each.generate(x).square().mean().backward()
    assert_mean_gradients(plain, model)
    _good_step(model)


@spmd(ranks=2)
def test_a_registered_method_is_bound_as_the_attribute_is() -> None:
    plain, model = _model(), fully_shard(_model())
    for name in ("doubled", "named", "scored"):
        register_forward_method(model, name)
    x = _batch()
    assert torch.equal(model.doubled(x), plain.doubled(x))
    assert model.named(x, name="it") == plain.named(x, name="it")
    assert torch.equal(model.scored(x), plain.scored(x))
    copied = copy.deepcopy(model)
    assert copied.named(x, name="it") == plain.named(x, name="it")
    assert torch.equal(copied.scored(x), plain.scored(x))


# --- what users do to modules -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit", "after_a_step"), [("encoder", False), ("encoder", True), ("(root)", True)]
)
@spmd(ranks=2, everywhere=True)
def test_removed_hooks_are_noticed_at_the_next_forward(unit: str, after_a_step: bool) -> None:
    model = fully_shard(_model(), policy={Layer})
    module = model if unit == "(root)" else model.get_submodule(unit)
    if after_a_step:
        _good_step(model)
    module._forward_pre_hooks.clear()
    module._forward_hooks.clear()
    assert (
        refusal(lambda: model(_batch()))
        == f"HooksRemovedError: unit '{unit}': the forward hooks that the annotation needs were"
        f" removed from its {type(module).__name__}. Remove hooks by their own handles; to take"
        " the annotation back, call remove()"
    )


@spmd(ranks=2)
def test_functional_call_computes_with_the_tensors_that_it_is_given() -> None:
    plain, model = _model(), _model()
    fully_shard(model, policy={Layer})
    generator = torch.Generator().manual_seed(5)
    given = {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device).requires_grad_()
        for name, p in plain.named_parameters()
    }
    x = _batch()
    expected = functional_call(plain, given, (x,))
    gradients = torch.autograd.grad(expected.square().mean(), list(given.values()))
    actual = functional_call(model, given, (x,))
    assert torch.equal(actual, expected)
    for one, other in zip(
        gradients, torch.autograd.grad(actual.square().mean(), list(given.values())), strict=True
    ):
        assert torch.equal(one, other)
    _good_step(model)


def _other_order() -> str:
    """Half of the ranks, of four those of the second replica, skip a unit in their first
    forward.
    """
    size = dist.get_world_size()
    model = _model()
    mesh = (
        init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
        if size == 4
        else None
    )
    fully_shard(model, policy={Layer}, mesh=mesh)
    if dist.get_rank() >= size // 2:
        model.forward = lambda x: model.head(model.decoder(x))  # type: ignore[method-assign]
    return refusal(lambda: model(_batch()))


@pytest.mark.launches_not_compared(
    "the ranks run different units, and say so without the comparison"
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_run_different_units_are_reported_by_name(
    pool: Pool, ranks: int, device: str
) -> None:
    need_devices(device, ranks)
    units = ["encoder"] * (ranks // 2) + ["decoder"] * (ranks // 2)
    seen = ", ".join(f"rank {rank} runs '{unit}'" for rank, unit in enumerate(units))
    assert (
        same_on_all(pool.run(ranks, _other_order, device=device, spoils=True))
        == f"RanksDisagreeError: the ranks run different units in the first forward: {seen}. Every"
        " rank must run the same annotated modules in the same order. If data decides what"
        " runs, annotate a module around it"
    )


@pytest.mark.launches_not_compared("the ranks disagree, and say so without the comparison")
@spmd(ranks=2)
def test_a_step_is_lost_on_the_rank_whose_first_forward_ends_before_that_of_others() -> None:
    model = _model()
    fully_shard(model, policy={Layer}, reshard_after_forward=False)
    if dist.get_rank() == 1:
        model.forward = lambda x: model.head(model.encoder(x))  # type: ignore[method-assign]
    reported = refusal(lambda: model(_batch()))
    assert "rank 0 runs 'decoder', rank 1 ends" in reported
    assert [unit["state"] for unit in describe(model).to_dict()["units"]] == ["SHARDED"] * 3
    vars(model).pop("forward", None)
    _good_step(model)

"""What annotating does to a model besides training it: nothing that a user can see, and the same by
hand and by policy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from composable import (
    MixedPrecisionPolicy,
    describe,
    fully_shard,
    keep_unsharded,
    remove,
    replicate,
    reshard,
    unshard,
)
from composable.comm.backends import comms_wrapped_by
from tests.helpers.battery import BATTERY, Case
from tests.helpers.battery.case import mean_square, rows
from tests.helpers.battery.odd import Layer
from tests.helpers.communicators import Log, Recording
from tests.helpers.compare import (
    assert_same_training,
    averaged_gradients,
    full_gradients,
    full_parameters,
)
from tests.helpers.logged import logged
from tests.helpers.schemes import SCHEMES
from tests.helpers.world import current_device, spmd


@spmd(ranks=[2, 3])
def test_another_dimension_can_be_sharded() -> None:
    def annotate(model: nn.Module, case: Case) -> None:
        fully_shard(model, policy=set(case.units), shard_placement_fn=_last_dimension)
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.placements == (Shard(parameter.ndim - 1),)

    assert_same_training(BATTERY["transformer with tied embedding"], annotate)


def _last_dimension(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.ndim - 1)


@spmd(ranks=2)
def test_ignored_parameters_stay_plain_and_are_not_reduced() -> None:
    case = BATTERY["a unit used several times"]
    model = case.model(0, 0, current_device())
    fully_shard(model, policy=set(case.units), ignored_params=["head.*", model.shared.up])
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) != name.startswith(("head.", "shared.up.")), name
    case.loss(model, *case.inputs(0, 0, dist.get_rank(), current_device())).backward()
    gradient = model.head.weight.grad
    assert gradient is not None
    other = gradient.clone()
    dist.broadcast(other, src=0)
    assert torch.equal(gradient, other) == (dist.get_rank() == 0)


@spmd(ranks=2)
def test_rank_0s_weights_can_be_everybodys() -> None:
    case = BATTERY["a unit used several times"]
    for verb in (fully_shard, replicate):
        expected = dict(case.model(0, 0, current_device()).named_parameters())
        model = case.model(dist.get_rank(), 0, current_device())
        verb(model, sync_module_states="broadcast")
        for name, value in full_parameters(model).items():
            assert torch.equal(value, expected[name]), name


@spmd(ranks=2)
def test_explicit_unshard_and_reshard_can_be_called_at_any_time() -> None:
    case = BATTERY["nested"]

    def annotate(model: nn.Module, case: Case) -> None:
        SCHEMES["fully_shard by policy"].annotate(model, case)
        inputs = case.inputs(0, 0, dist.get_rank(), current_device())
        unshard(model)
        unshard(model)
        pending = unshard(model, async_op=True)
        pending.wait()
        pending.wait()
        reshard(model)
        reshard(model)
        unshard(model, async_op=True)
        case.loss(model, *inputs).backward()
        loss = case.loss(model, *inputs)
        reshard(model)  # between forward and backward
        loss.backward()
        model.zero_grad()
        with keep_unsharded(model), torch.no_grad():
            first = model(*inputs)
            assert torch.equal(first, model(*inputs))
        assert {unit["state"] for unit in describe(model).to_dict()["units"]} == {"SHARDED"}

    assert_same_training(case, annotate)


class _Speaks(nn.Module):
    """As encoder-decoders of transformers: the encoder and the head, which are no units, are called
    and read by themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(9, 8)
        self.encoder = nn.Sequential(Layer(8), nn.LayerNorm(8))
        self.decoder = nn.Sequential(Layer(8), Layer(8))
        self.head = nn.Linear(8, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decoder(x))  # type: ignore[no-any-return]

    @torch.no_grad()
    def generate(self, steps: int) -> Tensor:
        x = self.encoder(self.words.weight[:2])
        for _ in range(steps):
            x = x + self.words(self(x).argmax(-1)) + self.head.weight[1]
        return x


def _layers(model: nn.Module, **arguments: Any) -> None:
    fully_shard(model, policy={Layer}, **arguments)


_WHOLE_IN_SCOPES: Final[dict[str, Callable[[_Speaks], None]]] = {
    "fully_shard": _layers,
    "hybrid": lambda model: _layers(model, mesh=init_device_mesh(current_device().type, (1, 2))),
    "a replicated part": lambda model: (replicate(model.encoder), _layers(model))[1],
    "a replicated root": lambda model: (_layers(model.decoder), replicate(model))[0],
    "reshards to neighbours": lambda model: _layers(model, reshard_after_forward=2),
}


@pytest.mark.parametrize("how", _WHOLE_IN_SCOPES)
@spmd(ranks=2)
def test_in_keep_unsharded_any_module_can_be_called_and_read_any_number_of_times(how: str) -> None:
    plain, model, log = _Speaks().to(current_device()), _Speaks().to(current_device()), Log()
    with comms_wrapped_by(partial(Recording, log=log)), logged() as lines:
        _WHOLE_IN_SCOPES[how](model)
        with keep_unsharded(model):
            log.events.clear()
            steps = 3 * dist.get_rank()  # none on rank 0, and no forward came before
            torch.testing.assert_close(model.generate(steps), plain.generate(steps))
            assert all(isinstance(value, DTensor) for value in model.state_dict().values())
            assert isinstance(model.head.weight, nn.Parameter)
            assert not isinstance(model.head.weight, DTensor)
            assert log.labels() == []
    assert lines == []
    assert "UNSHARDED" not in {unit["state"] for unit in describe(model).to_dict()["units"]}
    assert isinstance(model.head.weight, DTensor)


@spmd(ranks=2)
def test_in_keep_unsharded_gradients_are_found_where_they_are() -> None:
    """Forwards and steps in the scope, and what reads `model.parameters()` for their gradients."""
    plain, model = _Speaks().to(current_device()), _Speaks().to(current_device())
    _layers(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    x = torch.ones(2, 8, device=current_device())

    def step() -> None:
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each.zero_grad()
            each(x).square().mean().backward()
            nn.utils.clip_grad_norm_(each.parameters(), 0.01)
            optimizer.step()

    step()
    with keep_unsharded(model):
        step()
        step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        with keep_unsharded(model):
            torch.testing.assert_close(model.generate(3), plain.generate(3))
        step()
        reshard(model)
        step()
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name))


@spmd(ranks=2)
def test_gradients_from_before_the_annotation_are_reported_when_they_go() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(current_device())
    x = torch.ones(2, 3, device=current_device())
    model(x).sum().backward()
    with logged() as lines:
        fully_shard(model, policy={nn.Linear}, sync_module_states="broadcast")
        assert lines == [
            "WARNING: fully_shard: '0.weight', '0.bias', '1.weight', '1.bias' had gradients from"
            " before the annotation, which are dropped: nothing tells whether they were averaged"
            " over the ranks. Run backward after annotating"
        ]
        model(x).sum().backward()
        assert len(lines) == 1


class Outer(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(6, 6)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(torch.tanh(self.own(x)))


def _two_with_one_inside() -> nn.Module:
    shared = nn.Sequential(nn.LayerNorm(6), Layer())
    return nn.Sequential(Outer(shared), nn.Linear(6, 6), Outer(shared), nn.Linear(6, 2))


@spmd(ranks=2)
@pytest.mark.parametrize("inner", [(), (Layer,), (Layer, nn.Sequential)])
def test_a_module_inside_two_units_belongs_to_what_holds_both_places(
    inner: tuple[type[nn.Module], ...],
) -> None:
    case = Case(
        "a module in two units", _two_with_one_inside, rows(4, 6), mean_square, (Outer, *inner)
    )
    assert_same_training(case, SCHEMES["fully_shard by policy"].annotate)


class Flattened(nn.LSTM):
    """Moves its weights to memory of its own wherever torch's RNNs do so on CUDA."""

    def flatten_parameters(self) -> None:
        for weight in self._flat_weights:
            weight.data = weight.data.clone()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.flatten_parameters()  # as many models do
        output: Tensor = super().forward(x)[0]
        return output


@spmd(ranks=2)
def test_rnns_leave_their_weights_where_they_are_gathered() -> None:
    case = Case(
        "flattened",
        lambda: nn.Sequential(Flattened(5, 3, batch_first=True), nn.Linear(3, 2)),
        rows(3, 4, 5),
        mean_square,
        (Flattened,),
    )
    assert_same_training(case, SCHEMES["fully_shard by policy"].annotate)
    model = case.model(0, 0, current_device())
    fully_shard(model)
    remove(model, fully_shard)
    before = model[0].weight_ih_l0.data_ptr()  # type: ignore[union-attr, operator]
    model[0].flatten_parameters()  # type: ignore[operator]
    assert model[0].weight_ih_l0.data_ptr() != before  # type: ignore[union-attr, operator]


class Head(nn.Module):
    """It knows the agent that it is a part of, as a child."""

    def __init__(self, agent: nn.Module) -> None:
        super().__init__()
        self.last, self.agent = nn.Linear(5, 3), agent
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) * self.agent.scale + self.shift  # type: ignore[no-any-return]


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.scale = nn.Linear(4, 5), nn.Parameter(torch.ones(3))
        self.head = Head(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("policy", [None, {nn.Linear}, {Head}, {"head.last": {}}], ids=str)
@pytest.mark.parametrize("verb", [fully_shard, replicate])
@spmd(ranks=2)
def test_a_module_that_has_its_parent_as_a_child_trains(verb: Any, policy: Any) -> None:
    plain, ours = Agent(), Agent()
    for model in (plain, ours):
        for module in model.modules():
            module._apply(lambda tensor: tensor.to(current_device()), recurse=False)
    casts = MixedPrecisionPolicy(buffer_dtype={"head.shift": torch.float64})
    verb(ours, policy=policy, ignored_params=["body.bias"], mp_policy=casts)
    for step in range(2):
        for model in (plain, ours):
            model.zero_grad()
            generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
            model(torch.randn(3, 4, generator=generator).to(current_device())).sum().backward()
        expected = averaged_gradients(plain)
        for name, gradient in full_gradients(ours).items():
            if name != "body.bias":
                torch.testing.assert_close(gradient, expected[name])
    remove(ours, verb)
    assert [type(p) for p in ours.parameters()] == [nn.Parameter] * 5

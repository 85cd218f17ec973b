"""Ties across units: kept between replicated ones, refused by name between a sharded and a
replicated one.
"""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Final

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline as assert_text
from torch import Tensor, nn

from composable import (
    MixedPrecisionPolicy,
    apply_optimizer_in_backward,
    describe,
    fully_shard,
    remove,
    replicate,
)
from composable.errors import AnnotationError, ForeignParameterError, TiedParametersError
from tests.helpers.battery import BATTERY, Case
from tests.helpers.battery.transformers import Transformer
from tests.helpers.compare import assert_mean_gradients, assert_same_training
from tests.helpers.placed import placed
from tests.helpers.refusals import refused, same_on_all
from tests.helpers.world import Pool, current_device, spmd


def _transformer() -> Transformer:
    torch.manual_seed(0)
    return placed(Transformer(), current_device())


def _first_the_head(model: nn.Module) -> None:
    replicate(model.head)
    replicate(model)


def _siblings(model: nn.Module) -> None:
    for child in (*model.blocks, model.head, model.embedding):  # type: ignore[misc]
        replicate(child)
    replicate(model)


_ANNOTATIONS: Final[dict[str, Callable[[nn.Module], None]]] = {
    "a policy": lambda model: replicate(model, policy={nn.Linear, nn.Embedding}),
    "the head, then the model": _first_the_head,
    "one by one": _siblings,
}


@pytest.mark.parametrize("how", _ANNOTATIONS)
@spmd(ranks=2)
def test_a_parameter_of_two_replicated_units_is_averaged_once(how: str) -> None:
    def annotate(model: nn.Module, case: Case) -> None:
        _ANNOTATIONS[how](model)
        assert model.get_parameter("embedding.weight") is model.get_parameter("head.weight")
        count = sum(1 for _ in model.parameters())
        assert describe(model).to_dict()["total"]["parameters"] == count

    assert_same_training(BATTERY["transformer with tied embedding"], annotate)


class Two(nn.Module):
    """Two units with one weight, of which ranks may use either."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor, order: str) -> Tensor:
        for name in order:
            x = getattr(self, name)(x).tanh()
        return x


def _copies() -> tuple[Two, Two]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(placed(Two(), current_device(), torch.float64))
    return models[0], models[1]


def _assert_means(plain: nn.Module, ours: nn.Module, orders: list[str]) -> None:
    x = torch.full((2, 3), 1.0 + dist.get_rank(), dtype=torch.float64, device=current_device())
    for order in orders:
        for model in (plain, ours):
            model.zero_grad()
            model(x, order).sum().backward()
        assert_mean_gradients(plain, ours, order)


@spmd(ranks=2)
def test_ranks_that_use_a_tied_weight_in_different_units_get_its_mean() -> None:
    plain, ours = _copies()
    replicate(ours.a)
    replicate(ours.b)
    replicate(ours)
    _assert_means(
        plain, ours, ["ab", "b", "b", "aab"] if dist.get_rank() else ["b", "ab", "b", "abb"]
    )


F64: Final = torch.float64
_SUMS: Final[dict[str, MixedPrecisionPolicy | None]] = {
    "reduce_dtype": MixedPrecisionPolicy(reduce_dtype=F64),
    "keep_grads_in_reduce_dtype": MixedPrecisionPolicy(
        reduce_dtype=F64, keep_grads_in_reduce_dtype=True
    ),
    "grad_dtype": None,
}


@pytest.mark.parametrize("name", _SUMS)
@spmd(ranks=2)
def test_a_weight_of_several_roots_is_averaged_in_another_dtype_too(name: str) -> None:
    """The root that does not own it reads it outside of the calls of the one that does."""
    for in_backward, copied in ((False, False), (True, False), (False, True)):
        plain, ours = (model.float() for model in _copies())
        for parameter in ours.parameters() if name == "grad_dtype" else ():
            parameter.grad_dtype = F64
        for part in (ours.a, ours.b):
            replicate(part, mp_policy=_SUMS[name])
        if copied:
            ours = copy.deepcopy(ours)
        optimizers = [torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)]
        if in_backward:
            options = {"lr": 0.1, "momentum": 0.9}
            apply_optimizer_in_backward(torch.optim.SGD, ours.parameters(), options)
        else:
            optimizers.append(torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9))
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=False)
            for turn in range(1 if in_backward else 2):  # the second one adds to what is there
                for model, ranks in ((plain, (0, 1)), (ours, (dist.get_rank(),))):
                    inputs = [torch.full((2, 3), 1.0 + step + turn - rank) for rank in ranks]
                    x = torch.cat(inputs).to(current_device())
                    model(x, "ab").square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        for expected, found in zip(plain.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@spmd(ranks=2)
def test_a_tied_weight_whose_unit_was_removed_is_refused_where_it_is_read_until_that_is_annotated_anew() -> (
    None
):
    plain, ours = _copies()
    replicate(ours.a)
    replicate(ours.b)
    _assert_means(plain, ours, ["ab"])
    remove(ours.a, replicate)
    with pytest.raises(AnnotationError, match=r"no unit manages 'weight'"):
        ours(torch.ones(2, 3, dtype=torch.float64, device=current_device()), "ab")
    remove(ours.b, replicate)
    replicate(ours.b)
    for model in (plain, ours):
        model.a.bias.requires_grad_(False)
    _assert_means(plain, ours, ["ab", "b"])


_BY_HAND = (replicate, lambda model: (replicate(model.a), replicate(model.b)))


@spmd(ranks=2)
def test_weights_that_are_tied_after_the_annotation_are_averaged() -> None:
    for annotate in _BY_HAND:
        plain, ours = _copies()
        for model in (plain, ours):
            model.b.weight = nn.Parameter(model.b.weight.detach().clone())
        annotate(ours)
        _assert_means(plain, ours, ["ab", "ba"])
        for model in (plain, ours):
            model.a.weight = model.b.weight
        _assert_means(plain, ours, ["ab", "ba"])
        if annotate is not replicate:
            replicate(ours)  # around both
            _assert_means(plain, ours, ["ab", "ba"])


@spmd(ranks=2)
def test_a_weight_that_is_untied_after_the_annotation_is_refused() -> None:
    for annotate in _BY_HAND:
        _, ours = _copies()
        annotate(ours)
        ours.b.weight = nn.Parameter(ours.b.weight.detach().clone())
        with pytest.raises(
            ForeignParameterError,
            match=r"parameter '.*weight' of unit '.*' is tied: it has 2 places",
        ):
            ours(torch.ones(2, 3, dtype=torch.float64, device=current_device()), "ab")


def _other_mesh() -> str:
    _, ours = _copies()
    groups = [dist.new_group([rank]) for rank in range(2)]
    replicate(ours.a)
    return refused(ours, lambda: replicate(ours.b, mesh=groups[dist.get_rank()]))


def test_a_tied_parameter_that_would_be_averaged_over_two_meshes_is_refused(pool: Pool) -> None:
    assert_text(
        same_on_all(pool.run(2, _other_mesh)),
        """TiedParametersError: parameter 'b.weight' is tied to 'a.weight', which is replicated over another mesh. Pass the same mesh to both, or annotate both modules as one unit: replicate([a, b])""",
    )


# --- with fully_shard ---------------------------------------------------------------------------


def _mixed() -> list[str]:
    said = []
    model = _transformer()
    replicate(model.embedding)
    said.append(refused(model, lambda: fully_shard(model.head)))
    model = _transformer()
    fully_shard(model.embedding)
    said.append(refused(model, lambda: replicate(model)))
    said.append(refused(model, lambda: replicate(model.head)))
    model = _transformer()
    fully_shard([model.blocks[0], model.embedding])
    said.append(refused(model, lambda: fully_shard(model.head)))
    return said


def test_a_parameter_tied_between_a_sharded_and_a_replicated_unit_is_refused_by_name(
    pool: Pool,
) -> None:
    assert_text(
        "\n".join(pool.run(2, _mixed)[0]),
        """\
TiedParametersError: parameter 'head.weight' is tied to 'embedding.weight', which is replicated; it cannot be sharded, too. Annotate a module around both, which leaves the parameter replicated, or both modules alike, as one unit: replicate([a, b]) or fully_shard([a, b])
TiedParametersError: parameter 'head.weight' is tied to 'embedding.weight', which was sharded as part of another unit already. Annotate both modules alike, as one unit: fully_shard([a, b]) or replicate([a, b]); or name the units in policy=, which keeps tied parameters together
TiedParametersError: parameter 'head.weight' is tied to 'embedding.weight', which was sharded as part of another unit already. Annotate both modules alike, as one unit: fully_shard([a, b]) or replicate([a, b]); or name the units in policy=, which keeps tied parameters together
TiedParametersError: parameter 'head.weight' is tied to 'embedding.weight', which was sharded as part of another unit already. Annotate both modules alike, as one unit: fully_shard([a, b]) or replicate([a, b]); or name the units in policy=, which keeps tied parameters together""",
    )


@spmd(ranks=2)
def test_the_cure_for_ties_between_verbs_trains() -> None:
    def annotate(model: nn.Module, case: Case) -> None:
        replicate([model.embedding, model.head])
        fully_shard(model)

    assert_same_training(BATTERY["transformer with tied embedding"], annotate)


@spmd(ranks=2)
def test_a_tied_weight_that_one_unit_casts_is_refused_and_trains_in_one_unit() -> None:
    model = Two()
    replicate(model.a, mp_policy="bf16")
    before = model.b.weight
    with pytest.raises(TiedParametersError, match="cast in the forward of that unit only"):
        replicate(model.b, mp_policy="bf16")
    assert model.b.weight is before
    for annotate in (
        lambda each: replicate([each.a, each.b], mp_policy="bf16"),
        lambda each: replicate(each, policy={nn.Linear}, mp_policy="bf16"),
    ):
        model = Two()
        annotate(model)
        model(torch.ones(2, 3), "ab").sum().backward()
        assert model.a.weight.grad is not None
    ours = Two()
    replicate(ours.a)  # which casts nothing
    replicate(ours.b)
    ours(torch.ones(2, 3), "ab").sum().backward()

"""Annotations that cannot be are refused at once, with words that say what to do, and leave the module as it was."""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline as assert_text
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable import checkpoint, describe, fully_shard, replicate
from tests.helpers.battery import BATTERY, Case
from tests.helpers.battery.transformers import Block, Transformer
from tests.helpers.compare import assert_same_training
from tests.helpers.placed import placed
from tests.helpers.refusals import refused, same_on_all
from tests.helpers.world import Pool, current_device, spmd


def _transformer() -> Transformer:
    torch.manual_seed(0)
    return placed(Transformer(), current_device())


# --- order and repetition ---------------------------------------------------------------------------------------------


def _parent_before_child(sync: str) -> str:
    said = []
    for outer, inner in (
        (fully_shard, fully_shard),
        (fully_shard, replicate),
        (replicate, replicate),
        (replicate, fully_shard),
    ):
        model = _transformer()
        outer(model)
        said.append(refused(model, lambda inner=inner, model=model: inner(model.blocks[0], sync_module_states=sync)))
    return "\n".join(said)


@pytest.mark.parametrize("sync", ["check", "off"])
def test_a_child_after_its_parent_is_refused_by_name(pool: Pool, sync: str) -> None:
    assert_text(
        same_on_all(pool.run(2, _parent_before_child, sync)),
        """\
AnnotationError: 'blocks.0' is inside already-sharded '(root)'; annotate children first, or use policy=
AnnotationError: 'blocks.0' is inside already-sharded '(root)'; annotate children first, or use policy=
AnnotationError: 'blocks.0' is inside already-replicated Transformer; annotate children first, or use policy=
AnnotationError: 'blocks.0' is inside already-replicated Transformer; annotate children first""",
    )


def _twice(verb: Callable[..., Any]) -> str:
    model = _transformer()
    verb(model.blocks[1])
    verb(model.blocks[0])
    return refused(model, lambda: verb(model.blocks[1]))


@pytest.mark.parametrize("verb", [fully_shard, replicate, checkpoint])
def test_the_same_verb_twice_is_refused_with_the_place_of_the_first(pool: Pool, verb: Callable[..., Any]) -> None:
    assert_text(
        same_on_all(pool.run(2, _twice, verb)).replace(verb.__name__, "VERB"),
        """AlreadyAnnotatedError: VERB was already applied to 'blocks.1' (at FILE:LINE); to apply it anew, call remove(module, VERB) first""",
    )


def _sharded_and_replicated() -> tuple[str, str]:
    model = _transformer()
    replicate(model.blocks[0])
    fully_shard(model.blocks[1])
    return (
        refused(model, lambda: fully_shard(model.blocks[0])),
        refused(model, lambda: replicate(model.blocks[1])),
    )


def test_a_module_is_sharded_or_replicated_but_not_both(pool: Pool) -> None:
    assert_text(
        "\n".join(pool.run(2, _sharded_and_replicated)[0]),
        """\
ClashError: 'blocks.0' is managed by replicate; a module can be sharded or replicated, not both. Call remove(module, replicate) first
ClashError: 'blocks.1' is managed by fully_shard; a module can be sharded or replicated, not both. Call remove(module, fully_shard) first""",
    )


# --- what cannot be a unit --------------------------------------------------------------------------------------------


@spmd(ranks=[1, 2])
def test_a_parameter_in_two_units_of_a_policy_goes_to_the_module_around_both() -> None:
    def annotate(model: nn.Module, case: Case) -> None:
        fully_shard(model, policy={nn.Embedding, nn.Linear, Block})
        assert model.get_parameter("embedding.weight") is model.get_parameter("head.weight")

    assert_same_training(BATTERY["transformer with tied embedding"], annotate)


def _tied_to_the_parent() -> str:
    model = _transformer()
    fully_shard(model.embedding)
    return refused(model, lambda: fully_shard(model))


def _tied_to_a_sibling() -> str:
    model = _transformer()
    fully_shard(model.embedding)
    return refused(model, lambda: fully_shard(model.head))


def test_a_parameter_in_two_units_by_hand_is_refused_with_both_names(pool: Pool) -> None:
    assert_text(
        same_on_all(pool.run(2, _tied_to_the_parent)),
        """TiedParametersError: parameter 'head.weight' is tied to 'embedding.weight', which was sharded as part of another unit already. Annotate both modules as one unit: fully_shard([a, b]), or name the units in policy=, which keeps tied parameters together""",
    )
    assert_text(
        same_on_all(pool.run(2, _tied_to_a_sibling)),
        """TiedParametersError: parameter 'head.weight' is tied to 'embedding.weight', which was sharded as part of another unit already. Annotate both modules as one unit: fully_shard([a, b]), or name the units in policy=, which keeps tied parameters together""",
    )


def _containers() -> list[str]:
    model = _transformer()
    heads = nn.ModuleDict({"a": nn.Linear(2, 2)})
    return [
        refused(model, lambda: fully_shard(model.blocks)),
        refused(model, lambda: replicate(model.blocks)),
        refused(model, lambda: checkpoint(model.blocks)),
        refused(heads, lambda: fully_shard(heads)),
        refused(model, lambda: fully_shard(model, policy={nn.ModuleList})),
    ]


class _CallableList(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


def _callable_list() -> None:
    model = _CallableList([nn.Linear(2, 2)]).to(current_device())
    fully_shard(model)
    model(torch.ones(1, 2, device=current_device())).sum().backward()
    assert model[0].weight.grad is not None


def test_containers_without_a_forward_are_refused_and_subclasses_with_one_are_not(pool: Pool) -> None:
    assert_text(
        "\n".join(pool.run(2, _containers)[0]),
        """\
AnnotationError: ModuleList 'blocks' has no forward, so its parameters cannot be gathered around one; annotate its children, or pass policy=
AnnotationError: ModuleList 'blocks' has no forward, so its parameters cannot be gathered around one; annotate its children, or pass policy=
AnnotationError: ModuleList 'blocks' has no forward, so there is no forward to run again; annotate its children, or pass policy=
AnnotationError: ModuleDict has no forward, so its parameters cannot be gathered around one; annotate its children, or pass policy=
AnnotationError: ModuleList 'blocks' has no forward, so its parameters cannot be gathered around one; annotate its children, or pass policy=""",
    )
    pool.run(2, _callable_list)


def _read_by_parent() -> str:
    model = nn.MultiheadAttention(4, 2).to(current_device())
    return refused(model, lambda: fully_shard(model.out_proj))


def _read_by_parent_under_a_policy() -> list[str]:
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).to(current_device())
    fully_shard(model, policy={nn.Linear, nn.MultiheadAttention, nn.modules.linear.NonDynamicallyQuantizableLinear})
    model(torch.ones(1, 3, 4, device=current_device())).sum().backward()
    return [unit["unit"] for unit in describe(model).to_dict()["units"]]


def test_the_projection_that_attention_reads_itself_is_refused_alone_and_merged_under_a_policy(pool: Pool) -> None:
    assert_text(
        same_on_all(pool.run(2, _read_by_parent)),
        """AnnotationError: fully_shard: 'out_proj' is read by its parent (MultiheadAttention) without being called, so nothing would gather its parameters; annotate the MultiheadAttention instead""",
    )
    assert pool.run(2, _read_by_parent_under_a_policy)[0] == ["", "self_attn", "linear1", "linear2"]


# --- sizes that are fine ----------------------------------------------------------------------------------------------


class _Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.narrow = nn.Parameter(torch.ones(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scalar * self.narrow


@spmd(ranks=[2, 4])
def test_scalars_and_empty_shards_are_allowed_and_optimizers_norms_and_descriptions_take_them() -> None:
    model = _Ragged().to(current_device())
    fully_shard(model)
    assert isinstance(model.narrow, DTensor)
    assert model.narrow.to_local().shape == ((1, 4) if dist.get_rank() == 0 else (0, 4))
    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True),
    ):
        model(torch.ones(3, 4, device=current_device())).sum().backward()
        # The gradients of one row on n ranks, and their norm: 3 * 2 for each element of `narrow`, 12 for the scalar.
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        assert isinstance(norm, Tensor)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        gradients = [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]
        assert torch.allclose(whole, torch.cat([g.flatten() for g in gradients]).norm())
        optimizer.step()
        optimizer.zero_grad()
    (unit,) = describe(model).to_dict()["units"]
    assert unit["numel"] == 5
    assert unit["bytes_per_rank"] == (20 if dist.get_rank() == 0 else 4)


# --- ranks that differ ------------------------------------------------------------------------------------------------


def _different_weights(verb: Callable[..., Any]) -> str:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(current_device())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for parameter in model[1].parameters():
            parameter.fill_(dist.get_rank())
    return refused(model, lambda: verb(model, sync_module_states="check"))


@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_different_weights_are_refused_with_the_first_parameter_and_what_to_pass(pool: Pool, verb: Callable[..., Any]) -> None:
    assert_text(
        same_on_all(pool.run(2, _different_weights, verb)).replace(verb.__name__, "VERB"),
        """RanksDisagreeError: VERB: the ranks differ in values: rank 0 has parameter '1.weight' with fingerprint 0, rank 1 has parameter '1.weight' with fingerprint 4ed118cf600. Pass sync_module_states='broadcast', or seed equally.""",
    )


def _different_verbs() -> str:
    model = nn.Linear(2, 2).to(current_device())
    return refused(model, lambda: (fully_shard if dist.get_rank() else replicate)(model))


def test_different_verbs_are_refused_by_name(pool: Pool) -> None:
    assert_text(
        same_on_all(pool.run(2, _different_verbs)),
        """RanksDisagreeError: replicate: the ranks differ in verbs: rank 0 has replicate, rank 1 has fully_shard. Every rank must call the same verbs.""",
    )


def _different_modules(how: str) -> str:
    second = dist.get_rank() == 1
    modules: dict[str, nn.Module] = {"body": nn.Linear(3, 3), "head": nn.Linear(3, 2)}
    if how == "count" and second:
        modules["head"] = nn.Linear(3, 2, bias=False)
    if how == "names" and second:
        modules = {"body": modules["body"], "tail": modules["head"]}
    if how == "order" and second:
        modules = dict(reversed(list(modules.items())))
    if how == "shapes" and second:
        modules["head"] = nn.Linear(3, 4)
    if how == "dtypes" and second:
        modules["head"] = modules["head"].double()
    if how == "frozen" and second:
        modules["head"].requires_grad_(False)
    model = nn.Sequential()
    for name, module in modules.items():
        model.add_module(name, module.to(current_device()))
    return refused(model, lambda: fully_shard(model))


_PLACES: Final = {
    "count": "rank 0 has 'head.bias' (2,) float32, rank 1 has nothing there",
    "names": "rank 0 has 'head.weight' (2, 3) float32, rank 1 has 'tail.weight' (2, 3) float32",
    "order": "rank 0 has 'body.weight' (3, 3) float32, rank 1 has 'head.weight' (2, 3) float32",
    "shapes": "rank 0 has 'head.weight' (2, 3) float32, rank 1 has 'head.weight' (4, 3) float32",
    "dtypes": "rank 0 has 'head.weight' (2, 3) float32, rank 1 has 'head.weight' (2, 3) float64",
    "frozen": "rank 0 has 'head.weight' (2, 3) float32, rank 1 has 'head.weight' (2, 3) float32, frozen",
}


@pytest.mark.parametrize("how", _PLACES)
def test_different_parameters_are_refused_with_the_first_difference_not_a_hang(pool: Pool, how: str) -> None:
    assert same_on_all(pool.run(2, _different_modules, how)) == (
        f"RanksDisagreeError: fully_shard: the ranks differ in parameters: {_PLACES[how]}. Every rank must build the same module in the same order."
    )

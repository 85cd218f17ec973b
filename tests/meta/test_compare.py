"""The comparator of trainings: that it finds what is wrong and nothing else; knows no verb of the
library.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.helpers.battery import BATTERY, Case
from tests.helpers.compare import assert_same_training, differences
from tests.helpers.world import Pool, spmd

_CASE = "transformer with tied embedding"


def _averaging(
    change: Callable[[Tensor, nn.Parameter], Tensor],
) -> Callable[[nn.Module, Case], None]:
    """The simplest data parallelism there is, with something done to each gradient."""

    def annotate(model: nn.Module, case: Case) -> None:
        def reduce(parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            mean = parameter.grad / dist.get_world_size()
            dist.all_reduce(mean)
            parameter.grad = change(mean, parameter)

        for name, parameter in model.named_parameters():
            if not case.is_own(name):
                parameter.register_post_accumulate_grad_hook(reduce)

    return annotate


_correct = _averaging(lambda mean, parameter: mean)


@spmd(ranks=[1, 2, 3])
@pytest.mark.parametrize(
    "case", ["transformer with tied embedding", "transformer with BatchNorm", "odd sizes"]
)
def test_correct_data_parallelism_has_no_differences(case: str) -> None:
    assert_same_training(BATTERY[case], _correct)


def _found(annotate: Callable[[nn.Module, Case], None], case: str = _CASE) -> list[str]:
    return differences(BATTERY[case], annotate)


def _double() -> list[str]:
    return _found(_averaging(lambda mean, parameter: mean * 2))


def _slightly_off() -> list[str]:
    return _found(_averaging(lambda mean, parameter: mean * (1 + 1e-7)))


def _one_rank_not_synchronised() -> list[str]:
    def keep_own(mean: Tensor, parameter: nn.Parameter) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad if dist.get_rank() == 1 else mean

    return _found(_averaging(keep_own))


def _one_parameter_forgotten() -> list[str]:
    def lost(mean: Tensor, parameter: nn.Parameter) -> Tensor:
        return torch.zeros_like(mean) if parameter.shape == (5, 12) else mean

    return _found(_averaging(lost))


def _other_weights() -> list[str]:
    def annotate(model: nn.Module, case: Case) -> None:
        other = case.model(seed=1, rank=0)
        model.load_state_dict(other.state_dict())
        _correct(model, case)

    return _found(annotate)


def _zeros_for_unused() -> list[str]:
    def annotate(model: nn.Module, case: Case) -> None:
        _correct(model, case)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    return _found(annotate, "unused units and parameters")


def _own_running_statistics() -> list[str]:
    def replicated(model: nn.Module, case: Case) -> list[nn.Module]:
        return list(model.modules())

    return differences(BATTERY["transformer with BatchNorm"], _correct, replicated=replicated)


@pytest.mark.parametrize(
    ("mistake", "first"),
    [
        (_double, "gradient of step 0 'positions': Tensor-likes are not close!"),
        (_slightly_off, "gradient of step 0 'positions': Tensor-likes are not close!"),
        (_other_weights, "loss of step 0: Scalars are not close!"),
        (_one_parameter_forgotten, "gradient of step 0 'positions': Tensor-likes are not close!"),
        (_zeros_for_unused, "gradient of step 0 'loose': expected None, got torch.float64 (3, 3)"),
    ],
)
def test_a_mistake_is_found_on_every_rank_at_its_first_trace(
    pool: Pool, mistake: Callable[[], list[str]], first: str
) -> None:
    for found in pool.run(2, mistake):
        assert found[0].startswith(first)


def test_one_rank_that_does_not_synchronise_is_found_there_at_once_and_by_the_others_in_the_next_loss(  # noqa: E501
    pool: Pool,
) -> None:
    ours, theirs = pool.run(2, _one_rank_not_synchronised)
    assert theirs[0].startswith("gradient of step 0 'positions'")
    assert ours[0].startswith("loss of step 1")


def test_buffers_that_should_be_rank_0s_are_found_on_the_other_rank(pool: Pool) -> None:
    ours, theirs = pool.run(2, _own_running_statistics)
    assert ours == []
    assert [line.partition(":")[0] for line in theirs] == [
        "buffer 'batch_norm.running_mean'",
        "buffer 'batch_norm.running_var'",
    ]


class _Wrapper(nn.Linear):
    pass


def _change_anatomy() -> list[list[str]]:
    def swap_class(model: nn.Module, case: Case) -> None:
        _correct(model, case)
        model.head.__class__ = _Wrapper

    def patch_forward(model: nn.Module, case: Case) -> None:
        _correct(model, case)
        model.norm.forward = model.norm.forward

    def untie(model: nn.Module, case: Case) -> None:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        _correct(model, case)

    def reorder(model: nn.Module, case: Case) -> None:
        model.norm._parameters["weight"] = model.norm._parameters.pop("weight")
        _correct(model, case)

    return [_found(change) for change in (swap_class, patch_forward, untie, reorder)]


def test_a_changed_class_forward_tie_or_order_of_names_is_found(pool: Pool) -> None:
    kinds = [
        [line.partition(":")[0] for line in found[:1]] for found in pool.run(1, _change_anatomy)[0]
    ]
    assert kinds == [["types"], ["forwards"], ["parameters"], ["parameters"]]


def _torchs_own() -> list[str]:
    def annotate(model: nn.Module, case: Case) -> None:
        for module in reversed(list(model.modules())):
            if isinstance(module, case.units):
                torch_fully_shard(module)
        torch_fully_shard(model)

    return _found(annotate)


def test_sharded_tensors_are_compared_whole_and_only_the_swapped_classes_of_torchs_own_sharding_are_found(  # noqa: E501
    pool: Pool,
) -> None:
    for found in pool.run(2, _torchs_own):
        assert [line.partition(":")[0] for line in found] == ["types", "after training, types"]

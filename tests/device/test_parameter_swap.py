"""Modules see one form of their parameters or the other, and nothing that somebody else put there is touched."""

from __future__ import annotations

import torch
from torch import nn

from composable.device.parameter_swap import ParameterSwap, ParamInfo, Place, ShardedParam


def _slots(*places: tuple[nn.Module, str]) -> ShardedParam:
    sharded = places[0][0]._parameters[places[0][1]]
    assert sharded is not None
    slots = ShardedParam(ParamInfo("", tuple(Place(module, name) for module, name in places)), sharded)
    slots.unsharded = nn.Parameter(torch.zeros(2, 2))
    return slots


def test_modules_see_the_unsharded_parameters_while_they_are_shown() -> None:
    module = nn.Linear(2, 2)
    slots = [_slots((module, name)) for name in ("weight", "bias")]
    swap = ParameterSwap(slots)
    assert swap.intact()
    for _ in range(2):
        swap.use_unsharded()
        assert [module.weight, module.bias] == [slot.unsharded for slot in slots]
        assert not swap.intact()
        swap.use_sharded()
        assert all(one is slot.sharded for one, slot in zip((module.weight, module.bias), slots, strict=True))
        assert swap.intact()


def test_names_and_their_order_stay() -> None:
    module = nn.Linear(2, 2)
    swap = ParameterSwap([_slots((module, "bias")), _slots((module, "weight"))])
    swap.use_unsharded()
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    swap.use_sharded()
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]


def test_a_tied_parameter_changes_in_all_its_places() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = one.weight
    slots = _slots((one, "weight"), (other, "weight"))
    swap = ParameterSwap([slots])
    swap.use_unsharded()
    assert one.weight is other.weight is slots.unsharded
    swap.use_sharded()
    assert one.weight is other.weight is slots.sharded


def test_a_parameter_that_somebody_replaced_is_left_where_it_is_and_noticed() -> None:
    module = nn.Linear(2, 2)
    slots = _slots((module, "weight"))
    swap = ParameterSwap([slots])
    theirs = module.weight = nn.Parameter(torch.ones(2, 2))
    assert not swap.intact()
    swap.use_unsharded()
    assert module.weight is theirs
    module.weight = slots.sharded
    swap.use_unsharded()
    module.weight = theirs
    swap.use_sharded()
    assert module.weight is theirs


def test_a_module_that_keeps_books_on_its_parameters_hears_of_the_change() -> None:
    """RNNs compute with a list of their own, which follows attributes only."""
    module = nn.LSTM(2, 2)
    slots = [_slots((module, name)) for name in list(module._parameters)]
    swap = ParameterSwap(slots)
    swap.use_unsharded()
    assert [id(weight) for weight in module._flat_weights] == [id(slot.unsharded) for slot in slots]
    swap.use_sharded()
    assert [id(weight) for weight in module._flat_weights] == [id(slot.sharded) for slot in slots]
    assert swap.intact()


def test_replacing_a_parameter_reaches_every_place() -> None:
    one, rnn = nn.Linear(2, 2), nn.RNN(2, 2)
    rnn.weight_hh_l0 = one.weight
    slots = _slots((one, "weight"), (rnn, "weight_hh_l0"))
    fresh = nn.Parameter(torch.ones(2, 2))
    slots.replace(fresh)
    assert one.weight is rnn.weight_hh_l0 is slots.registered is fresh
    assert any(weight is fresh for weight in rnn._flat_weights)

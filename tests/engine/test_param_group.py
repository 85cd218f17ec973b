"""Parameters go through flat buffers and come out as they went in; memory comes and goes as the
states say.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from composable.comm.base import Traits
from composable.engine.params.layout import ParamShape
from composable.engine.params.param import cut
from composable.engine.params.param_group import ABSENT, ShardedState
from composable.engine.params.precision import Precision
from composable.errors import CommunicationError
from composable.torch_private import set_local
from tests.engine.layouts import SETTINGS, shapes
from tests.engine.ranks import (
    DIRECT,
    FLOAT32,
    NAN,
    PACKED,
    Rank,
    each,
    infos_of_replicas,
    infos_of_shards,
    local,
    ranks_of,
    unshard,
    values_of,
)

SHARDED, UNSHARDING, UNSHARDED, NEAR = ShardedState  # in the order of the table
LOW = Precision(torch.float32, torch.bfloat16, torch.bfloat16, torch.float32)
TRAITS = st.builds(
    Traits,
    direct_bytes=st.sampled_from([0, 32, 160, 1 << 60]),
    max_direct=st.sampled_from([1, 1 << 30]),
    align=st.sampled_from([1, 8, 16]),
    on_stream=st.booleans(),
)


def _some(
    number: int = 2, traits: Traits = PACKED, precision: Precision = FLOAT32, **options: Any
) -> list[Rank]:
    """A matrix cut along its rows, one along its columns, and a parameter that is not cut."""
    given_ = values_of([ParamShape("", (4, 3)), ParamShape("", (3, 5)), ParamShape("", (2,))])
    return ranks_of(
        given_, [0, 1, None], infos_of_shards(number, traits=traits, **options), precision
    )


def _nbytes(rank: Rank) -> int:
    """Memory of compute parameters other than those that share the shards'."""
    storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in rank.compute[:2]}
    return sum(storages.values())


# --- values -------------------------------------------------------------------------------------


@SETTINGS
@given(
    shapes(),
    st.integers(1, 7),
    TRAITS,
    st.sampled_from([FLOAT32, LOW]),
    st.sampled_from([None, "one", "all"]),
)
@example([ParamShape("w", (3, 0), 1)], 2, PACKED, FLOAT32, None)  # nothing along the cut
@example([ParamShape("w", (0, 4)), ParamShape("b", (0,))], 3, PACKED, FLOAT32, None)
# fewer rows than ranks
@example([ParamShape("w", (2, 3)), ParamShape("v", (3, 2), 1)], 5, DIRECT, FLOAT32, None)
def test_gathered_parameters_are_those_that_were_cut(
    specs: list[ParamShape], number: int, traits: Traits, precision: Precision, near: str | None
) -> None:
    infos = infos_of_shards(
        number, traits=traits, near=None if near is None else 1 if near == "one" else number
    )
    ranks = ranks_of(values_of(specs), [spec.dim for spec in specs], infos, precision)
    for step in range(2):
        whole = values_of(specs, seed=step) if step else values_of(specs)
        for rank in ranks if step else ():
            rank.group.shard.data.fill_(NAN)  # nothing reads what lies between the shards
            for slot, parameter, tensor in zip(rank.group.slots, rank.at_rest, whole, strict=True):
                local(parameter.data).copy_(cut(tensor, slot, rank.info.shard.rank))
        unshard(ranks)
        for rank in ranks:
            for parameter, tensor in zip(rank.compute, whole, strict=True):
                assert torch.equal(parameter, tensor.to(precision.compute))
        each(ranks, lambda rank: rank.group.reshard_after_forward())
        if near is not None:  # from what neighbours have kept
            unshard(ranks)
            assert all(
                torch.equal(p, t.to(precision.compute))
                for r in ranks
                for p, t in zip(r.compute, whole, strict=True)
            )
        each(ranks, lambda rank: rank.group.reshard())


@pytest.mark.parametrize("traits", [PACKED, DIRECT])
def test_parameters_keep_the_order_of_their_memory(traits: Traits) -> None:
    whole = torch.arange(240.0).view(4, 3, 4, 5).to(memory_format=torch.channels_last)
    ranks = ranks_of([whole, whole], [0, 1], infos_of_shards(2, traits=traits))
    unshard(ranks)
    for rank in ranks:
        for parameter, at_rest in zip(rank.compute, rank.at_rest, strict=True):
            assert torch.equal(parameter, whole)
            assert parameter.stride() == at_rest.stride() == whole.stride()


def test_a_shard_at_rest_is_a_dtensor_with_a_storage_of_its_own_over_the_shard_buffer() -> None:
    for rank in _some():
        w, v, s = rank.at_rest
        assert isinstance(w, DTensor)
        assert (w.placements, v.placements, s.placements) == (
            (Shard(0),),
            (Shard(1),),
            (Replicate(),),
        )
        assert [tuple(p.shape) for p in rank.at_rest] == [(4, 3), (3, 5), (2,)]
        with torch.no_grad():
            w.fill_(7.0)
        start = rank.group.slots[0].shard_start
        assert rank.group.shard[start : start + 6].tolist() == [7.0] * 6
        assert local(w).untyped_storage().nbytes() == local(w).nbytes, (
            "torch.save writes whole storages"
        )
        before = rank.group.shard._version
        with torch.no_grad():
            local(w).add_(1.0)
        assert rank.group.shard._version > before
        clone = copy.deepcopy(w)
        clone.data.fill_(9.0)
        assert not torch.equal(local(clone), local(w))
        torch.save(local(w), file := io.BytesIO())
        assert len(file.getvalue()) < 4096


def test_a_parameter_that_is_not_cut_has_one_memory_for_both_forms() -> None:
    rank, _ = _some()
    local(rank.at_rest[2].data).fill_(3.0)
    assert rank.compute[2].tolist() == [3.0, 3.0]
    assert rank.compute[2].data_ptr() == local(rank.at_rest[2]).data_ptr()


@pytest.mark.parametrize("traits", [PACKED, DIRECT])
def test_groups_made_in_inference_mode_can_be_trained_with(traits: Traits) -> None:
    with torch.inference_mode():
        ranks = _some(traits=traits)
    assert not any(
        p.is_inference() for rank in ranks for p in (*rank.compute, *rank.at_rest, rank.group.shard)
    )
    unshard(ranks)
    ranks[0].compute[0].sum().backward()
    assert ranks[0].compute[0].grad is not None


# --- states and memory --------------------------------------------------------------------------

# What follows from each state, "-" for no change; written down a second time, on purpose.
TABLE = """\
                      unshard      wait_for_unshard  reshard   reshard_after_forward
SHARDED               UNSHARDING   -                 -         -
UNSHARDING            -            UNSHARDED         SHARDED   -
UNSHARDED             -            -                 SHARDED   SHARDED_POST_FORWARD
SHARDED_POST_FORWARD  UNSHARDING   -                 SHARDED   -"""
REACHED_BY = {
    SHARDED: (),
    UNSHARDING: ("unshard",),
    UNSHARDED: ("unshard", "wait_for_unshard"),
    NEAR: ("unshard", "wait_for_unshard", "reshard_after_forward"),
}
CELLS = [
    (ShardedState[row.split()[0]], event, after)
    for row in TABLE.splitlines()[1:]
    for event, after in zip(TABLE.split()[:4], row.split()[1:], strict=True)
]


@pytest.mark.parametrize("traits", [PACKED, DIRECT])
@pytest.mark.parametrize(("state", "event", "after"), CELLS)
def test_groups_go_from_state_to_state(
    state: ShardedState, event: str, after: str, traits: Traits
) -> None:
    ranks = _some(4, traits, near=2)
    for step in (*REACHED_BY[state], event):
        each(ranks, lambda rank, step=step: getattr(rank.group, step)())
    expected = state if after == "-" else ShardedState[after]
    assert all(rank.group.state is expected for rank in ranks)
    assert all((_nbytes(rank) > 0) is (expected in (UNSHARDING, UNSHARDED)) for rank in ranks)


def test_a_group_with_nothing_to_gather_is_unsharded_at_all_times() -> None:
    for rank in (
        _some(1)[0],
        *ranks_of([torch.ones(2)], [None], infos_of_replicas(2), shards=False),
    ):
        each(
            [rank],
            lambda rank: rank.group.reshard(),
            lambda rank: rank.group.reshard_after_forward(),
        )
        assert rank.group.state is UNSHARDED
        assert not rank.group.takes_message


def test_packed_parameters_get_their_memory_when_their_message_has_landed() -> None:
    ranks = _some()
    before = [p.untyped_storage() for p in ranks[0].compute[:2]]
    each(ranks, lambda rank: rank.group.unshard())
    assert _nbytes(ranks[0]) == 0, "the message has come to a staging buffer"
    each(ranks, lambda rank: rank.group.wait_for_unshard())
    assert _nbytes(ranks[0]) >= 27 * 4
    group = ranks[0].group
    assert not any(
        buffer is not None and buffer.held
        for buffer in (*group.gather._stagings, group.gather._sent)
    )
    each(ranks, lambda rank: rank.group.reshard())
    assert all(storage.nbytes() == 0 for storage in before), (
        "aliases of the parameters hold no memory"
    )


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_on_a_device_one_kernel_copies_what_is_cut_along_rows_whatever_else_is_cut_otherwise() -> (
    None
):
    on_device = Traits(direct_bytes=1 << 60, max_direct=0, align=1, on_stream=True)
    shapes_ = [ParamShape("", (4, 3)), ParamShape("", (3, 6)), ParamShape("", (8,))]
    ranks = ranks_of(values_of(shapes_), [0, 1, 0], infos_of_shards(2, traits=on_device))
    each(ranks, lambda rank: rank.group.unshard())
    with _Operators() as seen:
        each(ranks[:1], lambda rank: rank.group.wait_for_unshard())
    copies = [name for name in seen.names if "copy" in name]
    assert copies == ["split_with_sizes_copy", "_foreach_copy_"]
    (sizes,) = [sizes for _, sizes, _ in ranks[0].group.gather._columns]
    assert sizes == [6, 4], "both matrices of rows, and not the one of columns"


@pytest.mark.parametrize("number", [2, 4])  # the columns are cut evenly, or not
def test_packed_parameters_are_put_in_their_place_by_one_operator_whatever_dimension_is_cut(
    number: int,
) -> None:
    given_ = values_of([ParamShape("", (4, 3)), ParamShape("", (3, 6)), ParamShape("", (7,))])
    ranks = ranks_of(given_, [0, 1, 0], infos_of_shards(number, traits=PACKED), FLOAT32)

    seen = _Operators()

    def land(rank: Rank) -> None:
        rank.group._wait()
        with seen:
            rank.group.gather.land()

    each(ranks, lambda rank: rank.group.unshard(), land)
    assert seen.names == ["_foreach_copy_"] * number
    for rank in ranks:
        for compute, value in zip(rank.compute, given_, strict=True):
            assert torch.equal(compute.data, value)


def test_a_gather_that_fails_leaves_the_group_sharded_without_memory() -> None:
    ranks = _some()
    unshard(ranks)
    each(ranks, lambda rank: rank.group.reshard())

    class Failed:
        def wait(self) -> None:
            raise CommunicationError("as planned")

    group = ranks[0].group
    group.comm.all_gather = lambda pairs, launch: Failed()
    group.unshard()
    with pytest.raises(CommunicationError):
        group.wait_for_unshard()
    assert group.state is SHARDED
    assert _nbytes(ranks[0]) == 0


def test_a_gather_that_cannot_be_launched_leaves_no_memory_behind() -> None:
    def refuse(pairs: object, launch: object) -> Any:
        raise MemoryError("as planned")

    ranks = _some(precision=LOW)
    group = ranks[0].group
    group.comm.all_gather = refuse
    with pytest.raises(MemoryError):
        group.unshard()
    assert group.state is SHARDED
    assert _nbytes(ranks[0]) == 0
    held = [each.held for each in (group.gather._sent, *group.gather._stagings) if each is not None]
    assert not any(held)


def test_a_gather_in_flight_is_given_up_without_a_copy() -> None:
    """There may be no memory left to copy to."""

    def no_memory(rows: Tensor) -> None:
        raise MemoryError("as planned")

    ranks = _some(traits=PACKED)
    each(ranks, lambda rank: rank.group.unshard())
    for rank in ranks:
        rank.group.gather.copy_out = no_memory  # type: ignore[method-assign]
    each(ranks, lambda rank: rank.group.reshard())
    assert [rank.group.state for rank in ranks] == [SHARDED] * 2
    assert _nbytes(ranks[0]) == 0


def test_aliases_of_compute_parameters_are_known_while_their_memory_is_there() -> None:
    ranks = _some()
    rank, _ = ranks
    unshard(ranks)
    view = rank.compute[0].detach().t()
    assert rank.group.aliases(view)
    assert not rank.group.aliases(view.clone())
    each(ranks, lambda rank: rank.group.reshard())
    assert not rank.group.aliases(view)


# --- version counters ---------------------------------------------------------------------------


def _squares(rank: Rank) -> Tensor:
    """A loss whose backward needs both cut parameters as they were."""
    w, v, _ = rank.compute
    return (w @ v).square().sum()


@pytest.mark.parametrize("traits", [PACKED, DIRECT])
def test_autograd_uses_saved_parameters_that_were_freed_and_gathered_again(traits: Traits) -> None:
    ranks = _some(traits=traits)
    unshard(ranks)
    whole = [p.detach().clone().requires_grad_() for p in ranks[0].compute]
    loss = _squares(ranks[0])
    each(ranks, lambda rank: rank.group.reshard())
    assert {p._version for p in ranks[0].compute[:2]} == {ABSENT}
    unshard(ranks)
    loss.backward()
    (whole[0] @ whole[1]).square().sum().backward()
    assert torch.equal(ranks[0].compute[0].grad, whole[0].grad)


def test_a_graph_that_needs_freed_memory_is_refused_by_autograd() -> None:
    ranks = _some()
    unshard(ranks)
    loss = _squares(ranks[0])
    each(ranks, lambda rank: rank.group.reshard())
    with pytest.raises(RuntimeError, match=f"is at version {ABSENT}"):
        loss.backward()


@pytest.mark.parametrize("how", ["parameter", "local tensor"])
@pytest.mark.parametrize("while_unsharded", [True, False])
def test_after_a_write_at_rest_parameters_are_gathered_anew_and_graphs_of_before_refused(
    how: str, while_unsharded: bool
) -> None:
    ranks = _some()
    unshard(ranks)
    loss = _squares(ranks[0])
    if not while_unsharded:
        each(ranks, lambda rank: rank.group.reshard())
    with torch.no_grad():
        for rank in ranks:
            (rank.at_rest[0] if how == "parameter" else local(rank.at_rest[0])).mul_(2.0)
    before = ranks[0].compute[0].detach().clone() if while_unsharded else None
    unshard(ranks)
    # what writes to a local tensor may be one rank alone
    factor = 2.0 if how == "parameter" else 1.0
    assert before is None or torch.equal(ranks[0].compute[0], factor * before)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- identity -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["as it is", "moved", "assigned"])
def test_at_rest_parameters_stay_the_same_objects_when_a_group_is_built_again(way: str) -> None:
    ranks = _some()
    before = [rank.at_rest for rank in ranks]
    for rank in ranks:
        for index, parameter in enumerate(rank.at_rest):
            if way == "moved":
                set_local(parameter, local(parameter.detach()) * 2.0)
            elif way == "assigned":
                setattr(rank.module, f"p{index}", nn.Parameter(parameter.detach() * 2.0))
        rank.build()
    unshard(ranks)
    factor = 1.0 if way == "as it is" else 2.0
    for whole, *forms in zip(_whole(), *[rank.compute for rank in ranks], strict=True):
        assert all(torch.equal(form, factor * whole) for form in forms)
    same = all(
        one is other
        for rank, old in zip(ranks, before, strict=True)
        for one, other in zip(rank.at_rest, old, strict=True)
    )
    assert same is (way != "assigned")


def _whole() -> list[Tensor]:
    return values_of([ParamShape("", (4, 3)), ParamShape("", (3, 5)), ParamShape("", (2,))])


def test_attributes_and_hooks_go_with_a_parameter() -> None:
    rank, _ = ranks_of([torch.ones(2, 2)], [None], infos_of_replicas(2), shards=False)
    (own,) = rank.at_rest
    own.tag = "mine"
    calls: list[str] = []
    handle = own.register_hook(lambda gradient: calls.append("hook"))
    rank.shards = True
    rank.build()
    (at_rest,) = rank.at_rest
    assert at_rest is not own
    assert at_rest.tag == "mine"
    assert len(at_rest._backward_hooks) == 1
    handle.remove()
    assert not at_rest._backward_hooks


# --- replicated parameters in a tree with shards ------------------------------------------------


def test_replicated_parameters_rest_as_dtensors_over_the_users_memory_and_back() -> None:
    rank, _ = ranks_of([torch.arange(4.0)], [None], infos_of_replicas(2), shards=False)
    (own,) = rank.at_rest
    own.grad = torch.ones(4)
    own.register_post_accumulate_grad_hook(lambda parameter: None)
    rank.rest_mesh = rank.info.mesh
    rank.build()
    (at_rest,) = rank.at_rest
    assert isinstance(at_rest, DTensor)
    assert at_rest.placements == (Replicate(),)
    assert local(at_rest).data_ptr() == own.data_ptr()
    assert rank.compute == [own]
    assert local(at_rest.grad).tolist() == [1.0] * 4
    assert own.grad is None
    assert at_rest._post_accumulate_grad_hooks
    assert not own._post_accumulate_grad_hooks
    with torch.no_grad():
        at_rest.mul_(2.0)
    rank.rest_mesh = None
    rank.build()
    assert rank.at_rest[0] is own
    assert own.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert own.grad is not None
    assert own._post_accumulate_grad_hooks


def test_a_cast_of_a_replicated_parameter_takes_memory_only_while_it_is_unsharded() -> None:
    rank, _ = ranks_of([torch.ones(4)], [None], infos_of_replicas(2), LOW, shards=False)
    assert not rank.group.takes_message
    for value in (2.0, 3.0):
        rank.at_rest[0].data.fill_(value)
        unshard([rank])
        assert rank.compute[0].dtype is torch.bfloat16
        assert rank.compute[0].tolist() == [value] * 4
        rank.group.reshard()
        assert rank.compute[0].untyped_storage().nbytes() == 0

"""`replicate` keeps sparse gradients sparse, with DDP's numbers, whichever ranks have them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from composable import MixedPrecisionPolicy, fully_shard, no_sync, reduce_gradients, replicate
from composable.errors import AnnotationError
from tests.helpers.compare import averaged_gradients, full_gradients
from tests.helpers.world import current_device, spmd

pytestmark = pytest.mark.sparse
ROWS: Final = 12


class Lookups(nn.Module):
    """Two sparse tables and a dense layer; a forward uses the tables that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(ROWS, 4, sparse=True)
        self.bags = nn.EmbeddingBag(ROWS, 4, sparse=True, mode="sum")
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, tables: Sequence[str] = ("words", "bags")) -> Tensor:
        found = {"words": lambda: self.words(x).sum(1), "bags": lambda: self.bags(x)}
        y: Tensor = self.head(
            sum([found[table]() for table in tables], self.head.weight.new_zeros(len(x), 4))
        )
        return y.square().sum()


def _batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randint(0, ROWS, (2 + dist.get_rank(), 3), generator=generator).to(
        current_device()
    )


def _optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    sparse = [p for name, p in model.named_parameters() if "head" not in name]
    dense = [p for name, p in model.named_parameters() if "head" in name]
    return [torch.optim.SparseAdam(sparse, lr=0.1), torch.optim.SGD(dense, lr=0.1)]


@spmd(ranks=1)
def test_hooks_of_users_run_once_where_one_rank_trains_alone() -> None:
    model = replicate(nn.Embedding(ROWS, 4, sparse=True).to(current_device()))
    calls: list[bool] = []
    model.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.is_sparse))
    model(_batch(0)).sum().backward()
    assert calls == [True]


@spmd(ranks=2)
def test_sparse_adam_trains_as_with_ddp() -> None:
    ours = Lookups().to(current_device())
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    replicate(ours)
    optimizers = [*_optimizers(ours), *_optimizers(theirs)]
    for step in range(4):
        for model in (ours, theirs):
            model(_batch(step)).backward()
        for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert one.grad.is_sparse == other.grad.is_sparse == ("head" not in name)
            assert torch.equal(one.grad.to_dense(), other.grad.to_dense()), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("accumulate", [False, True])
@spmd(ranks=[2, 4])
def test_ranks_without_a_sparse_gradient_bring_none_and_what_nobody_used_stays(
    accumulate: bool,
) -> None:
    plain, ours = Lookups().double().to(current_device()), Lookups().double().to(current_device())
    replicate(ours)
    mine = [("words",), ("words", "bags"), (), ("bags",)]
    others = [("words",), ("words",), ("bags",), ()]
    expected: dict[str, Tensor | None] = {}
    for step, tables in enumerate(others if dist.get_rank() else mine):
        if not accumulate:
            ours.zero_grad()
        plain.zero_grad()
        for model in (plain, ours):
            model(_batch(step), tables).backward()
        dense = Lookups().double().to(current_device())
        for one, other in zip(dense.parameters(), plain.parameters(), strict=True):
            one.grad = None if other.grad is None else other.grad.to_dense()
        for name, mean in averaged_gradients(dense).items():
            before = expected.get(name) if accumulate else None
            expected[name] = before if mean is None else mean if before is None else before + mean
        for name, parameter in ours.named_parameters():
            if expected[name] is None:
                assert parameter.grad is None, (name, step)
                continue
            assert parameter.grad is not None, (name, step)
            assert parameter.grad.is_sparse == ("head" not in name)
            torch.testing.assert_close(
                parameter.grad.to_dense(), expected[name], msg=lambda text, n=name: f"{n}: {text}"
            )


@spmd(ranks=2)
def test_a_sparse_table_alone_is_a_unit_and_one_that_a_dense_layer_reads_too_is_right() -> None:
    for tied in (False, True):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            table, head = nn.Embedding(ROWS, 4, sparse=True), nn.Linear(4, ROWS, bias=False)
            if tied:
                head.weight = table.weight
            models.append(nn.Sequential(table, head).double().to(current_device()))
        plain, ours = models
        replicate(ours[0])
        replicate(ours)
        for model in models:
            model(_batch(0)).square().sum().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                if model is plain:
                    parameter.grad = parameter.grad.to_dense()
        expected = averaged_gradients(plain)
        for name, parameter in ours.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.is_sparse == (name == "0.weight" and not tied)
            torch.testing.assert_close(parameter.grad.to_dense(), expected[name])


@spmd(ranks=2)
def test_tables_with_sparse_gradients_cannot_be_sharded_but_what_does_not_train_them_so_can() -> (
    None
):
    for kind in (nn.Embedding, nn.EmbeddingBag):
        table = kind(ROWS, 4, sparse=True, device=current_device())
        model = nn.Sequential(table, nn.Linear(4, 4, device=current_device()))
        weight = table.weight
        for policy in (None, {kind}):
            with pytest.raises(AnnotationError) as caught:
                fully_shard(model, policy=policy, sync_module_states="broadcast")
            assert (
                str(caught.value)
                == f"parameter '0.weight' gets sparse gradients ({kind.__name__}, sparse=True);"
                " gradients of sharded parameters are dense. Call replicate() on the"
                f" {kind.__name__} before, or make it with sparse=False"
            )
            assert table.weight is weight
        fully_shard(
            copy.deepcopy(model), ignored_params=["0.weight"], sync_module_states="broadcast"
        )
        frozen = copy.deepcopy(model)
        frozen[0].requires_grad_(False)
        fully_shard(frozen, sync_module_states="broadcast")
        replicate(table, sync_module_states="broadcast")
        fully_shard(model, sync_module_states="broadcast")
        for each in (frozen, model):
            each(torch.zeros(1, 1, dtype=torch.int64, device=current_device())).sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse


class Tied(nn.Module):
    """A head reads the weight of a sparse table, unless a forward leaves it out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(ROWS, 4, sparse=True), nn.Linear(4, ROWS)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor, head: bool) -> Tensor:
        y = self.table(x)
        return (self.head(y) if head else y).square().sum()  # type: ignore[no-any-return]


@spmd(ranks=2)
def test_a_table_that_a_sharded_head_is_tied_to_gets_dense_gradients_whichever_of_them_is_used() -> None:  # fmt: skip  # noqa: E501
    plain, ours = Tied().to(current_device()), Tied().to(current_device())
    replicate(ours.table)
    fully_shard(ours)
    for model in (plain, ours):
        model(_batch(0), head=dist.get_rank() == 1).backward()
    assert plain.table.weight.grad is not None
    plain.table.weight.grad = plain.table.weight.grad.to_dense()
    expected, actual = (
        averaged_gradients(plain)["table.weight"],
        full_gradients(ours)["table.weight"],
    )
    assert actual is not None
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("sharded", [False, True])
@spmd(ranks=2)
def test_sparse_gradients_with_precision_scaling_and_accumulation(sharded: bool) -> None:
    plain, ours = Lookups().to(current_device()), Lookups().to(current_device())
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    replicate(ours.words, mp_policy=low, grad_reduce="sum")
    called: list[Tensor] = []
    ours.words.weight.register_post_accumulate_grad_hook(
        lambda parameter: called.append(parameter.grad.clone())
    )
    (fully_shard if sharded else replicate)(ours, ignored_params=["bags.weight"])
    for step in range(3):
        with no_sync(ours, enabled=step < 2):
            ours.words(_batch(step)).sum().backward()
        plain.words(_batch(step)).sum().backward()
    plain.words.weight.grad = plain.words.weight.grad.to_dense()
    expected = averaged_gradients(plain)["words.weight"]
    assert expected is not None
    (gradient,) = called
    assert gradient.is_sparse
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient.to_dense(), 2 * expected)
    with no_sync(ours):
        ours.words(_batch(3)).sum().backward()
    reduce_gradients(ours)
    assert len(called) == 2
    with no_sync(ours):
        ours.words(_batch(4)).sum().backward()
    ours._apply(torch.clone)  # as `ours.to(...)` does
    ours(_batch(4), tables=()).backward()
    assert len(called) == 3, "what waited is reduced, though this backward brought nothing to it"


@spmd(ranks=3)
def test_a_sparse_mean_is_rounded_once_where_the_reduction_is_in_float32() -> None:
    table = nn.Embedding(ROWS, 4, sparse=True, dtype=torch.bfloat16, device=current_device())
    replicate(table, mp_policy=MixedPrecisionPolicy(reduce_dtype="fp32"))
    terms = [torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    terms = [term.bfloat16().to(current_device()) for term in terms]
    rows = torch.arange(ROWS, device=current_device())
    (table(rows) * terms[dist.get_rank()]).sum().backward()
    mean = torch.stack([term.double() for term in terms]).mean(0)
    assert table.weight.grad is not None
    assert torch.equal(table.weight.grad.to_dense(), mean.bfloat16())


class Functional(nn.Module):
    """A table that no module tells of: read sparsely, densely or not at all, next to a dense
    parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Parameter(torch.rand(ROWS, 4)), nn.Linear(4, 1)

    def forward(self, x: Tensor, read: str) -> Tensor:
        y = torch.ones(len(x), 3, 4, device=x.device)
        if read:
            y = y * F.embedding(x, self.table, sparse=read == "sparse")
        return self.head(y).sum()  # type: ignore[no-any-return]


def _mixed(model: Functional, **arguments: Any) -> None:
    fully_shard(model.head, **arguments)
    replicate(model, **arguments)


def _hybrid(model: Functional, **arguments: Any) -> None:
    fully_shard(
        model,
        mesh=init_device_mesh(current_device().type, (2, dist.get_world_size() // 2)),
        **arguments,
    )


_LOW: Final = MixedPrecisionPolicy(reduce_dtype=torch.float64)
_SPARSE_ANYHOW: Final[dict[str, Callable[..., Any]]] = {
    "fully_shard": fully_shard,
    "hybrid": _hybrid,
    "replicate": replicate,
    "replicate, reduced in another dtype": partial(replicate, mp_policy=_LOW),
    "mixed": _mixed,
    "fully_shard, reduced in another dtype": partial(fully_shard, mp_policy=_LOW),
}


@pytest.mark.parametrize("scheme", _SPARSE_ANYHOW)
@spmd(ranks=2)
def test_functional_sparse_gradients_are_scaled_accumulated_and_reduced_as_dense_ones(
    scheme: str,
) -> None:
    reads = (
        ("sparse", "sparse"),
        ("sparse", "dense"),
        ("dense", "sparse"),
        ("sparse", ""),
        ("", "sparse", "sparse"),
    )
    for number, (steps, synced) in enumerate(itertools.product(reads, ("always", "last", "never"))):
        _assert_as_plain(_SPARSE_ANYHOW[scheme], 1 + number % 2, steps, synced)


def _assert_as_plain(
    annotate: Callable[..., Any], factor: int, steps: Sequence[str], synced: str
) -> None:
    plain, ours = Functional().to(current_device()), Functional().to(current_device())
    annotate(ours, grad_reduce="sum" if factor == 2 else "mean")
    for step, read in enumerate(steps):
        # On rank 1 the table is read in the other order.
        mine = read if dist.get_rank() == 0 else steps[-1 - step]
        with no_sync(
            ours, enabled=synced == "never" or (synced == "last" and step < len(steps) - 1)
        ):
            ours(_batch(step), mine).backward()
        plain(_batch(step), mine).backward()
    if synced == "never":
        reduce_gradients(ours)
    for parameter in plain.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad.to_dense()
    actual = full_gradients(ours)
    for name, expected in averaged_gradients(plain).items():
        found = actual[name]
        assert expected is not None
        assert found is not None
        torch.testing.assert_close(
            found, factor * expected, msg=lambda text, n=name: f"{n}, {steps}, {synced}: {text}"
        )

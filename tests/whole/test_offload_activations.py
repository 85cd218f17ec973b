"""Activations of offloaded modules wait on the host, and training does not notice: bit for bit, in every composition."""

from __future__ import annotations

import copy
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from composable import checkpoint, describe, fully_shard, offload_activations, registry, remove, replicate
from composable.device.host_copies import AHEAD
from composable.errors import AnnotationError, SavedTensorError
from tests.helpers.battery import BATTERY
from tests.helpers.battery.transformers import Block, Transformer, next_token_loss
from tests.helpers.compare import full_gradients
from tests.helpers.offloading import Seen, offloading
from tests.helpers.world import Pool, current_device, need_devices, spmd

# --- parity -----------------------------------------------------------------------------------------------------------


def _hybrid(model: nn.Module) -> None:
    mesh = init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, policy={Block}, mesh=mesh)


def _mixed(model: nn.Module) -> None:
    replicate(model.blocks[0])
    fully_shard(model, policy={Block})


_SPREAD: Final[dict[str, Callable[[nn.Module], object]]] = {
    "nothing else": lambda model: None,
    "fully_shard": lambda model: fully_shard(model, policy={Block}),
    "without resharding": lambda model: fully_shard(model, policy={Block}, reshard_after_forward=False),
    "bfloat16": lambda model: fully_shard(model, policy={Block}, mp_policy="bf16"),
    "replicate": lambda model: replicate(model, bucket_cap_mb=0.0002),
    "both": _mixed,
    "hybrid": _hybrid,
}
# With what of offload beside it: an annotation without it, and the same with it.
_KEPT: Final[dict[str, tuple[Callable[[nn.Module], object], Callable[[nn.Module, Seen], object]]]] = {
    "blocks": (
        lambda model: None,
        lambda model, seen: offload_activations(model, policy={Block}, **seen.options),
    ),
    "the model": (
        lambda model: None,
        lambda model, seen: offload_activations(model, **seen.options),
    ),
    "one in the other": (
        lambda model: None,
        lambda model, seen: (
            offload_activations(model, **seen.options),
            offload_activations(model, policy={nn.Linear}, **seen.options),
        ),
    ),
    "blocks that are recomputed": (
        lambda model: checkpoint(model, policy={Block}),
        lambda model, seen: offload_activations(model, policy={Block}, **seen.options),
    ),
    "around blocks that are recomputed": (
        lambda model: checkpoint(model, policy={Block}),
        lambda model, seen: offload_activations(model, **seen.options),
    ),
    "inside of blocks that are recomputed": (
        lambda model: checkpoint(model, policy={Block}),
        lambda model, seen: offload_activations(model, policy={nn.Linear, nn.LayerNorm}, **seen.options),
    ),
    "blocks of a model that is recomputed": (
        lambda model: checkpoint(model),
        lambda model, seen: offload_activations(model, policy={Block}, **seen.options),
    ),
}


def _tokens(step: int = 0) -> Tensor:
    (tokens,) = BATTERY["transformer with tied embedding"].inputs(0, step, dist.get_rank(), current_device())
    return tokens


def _transformer(dropout: float = 0.0) -> Transformer:
    torch.manual_seed(0)
    return Transformer(dropout=dropout).to(current_device())


def _one_backward(model: nn.Module) -> list[Tensor]:
    loss = next_token_loss(model, _tokens())
    loss.backward()
    return [loss]


def _two_forwards_before_a_backward(model: nn.Module) -> list[Tensor]:
    loss = next_token_loss(model, _tokens()) + 2 * next_token_loss(model, _tokens(1))
    loss.backward()
    return [loss]


def _backward_twice(model: nn.Module) -> list[Tensor]:
    loss = next_token_loss(model, _tokens())
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


_PROGRAMS: Final = (_one_backward, _two_forwards_before_a_backward, _backward_twice)


def _compare(spread: str, kept: str) -> None:
    beside, offload = _KEPT[kept]
    plain, model = _transformer(0.2), _transformer(0.2)
    for each in (plain, model):
        _SPREAD[spread](each)
        beside(each)
    with offloading() as seen:
        offload(model, seen)
        for program in _PROGRAMS:
            if program is _backward_twice and "recomputed" in kept:
                continue  # torch frees what was recomputed
            results = []
            for each in (plain, model):
                torch.manual_seed(100 + dist.get_rank())
                results.append([*program(each), *full_gradients(each).values()])
                each.zero_grad()
            assert seen.left, "something left the device"
            assert all(torch.equal(*pair) for pair in zip(*results, strict=True)), (spread, kept, program.__name__)
            assert not seen.alive


def _compare_all(spread: str, kept: tuple[str, ...]) -> None:
    for each in kept:
        _compare(spread, each)


_ALL: Final = tuple(_KEPT)
_SOME: Final = ("blocks", "blocks that are recomputed", "inside of blocks that are recomputed")


@pytest.mark.parametrize(
    ("ranks", "spread", "kept"),
    [
        (1, "nothing else", _ALL),
        (1, "fully_shard", _SOME[:1]),
        (2, "fully_shard", _ALL),
        (2, "without resharding", _SOME[:1]),
        (2, "bfloat16", _SOME[:2]),
        (2, "replicate", _SOME),
        (2, "both", _SOME[1:]),
        (4, "hybrid", _SOME[:2]),
    ],
)
def test_losses_and_gradients_are_the_same_to_the_last_bit(
    pool: Pool, ranks: int, spread: str, kept: tuple[str, ...], device: str
) -> None:
    need_devices(device, ranks)
    pool.run(ranks, _compare_all, spread, kept, device=device)


# --- what leaves, and what stays --------------------------------------------------------------------------------------


class Line(nn.Module):
    """Saves its input, and what its ReLU returns."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def _line(**options: Any) -> Line:
    torch.manual_seed(0)
    return offload_activations(Line().to(current_device()), **options)


def _x(*shape: int) -> Tensor:
    shape = shape or (4, 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(current_device())


@spmd(ranks=1)
def test_storages_leave_once_and_parameters_and_buffers_never() -> None:
    class Views(Line):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(8))
            self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
            self.register_buffer("table", torch.randn(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x * self.table) * self.scale[None]
            return x @ self.frozen.t() @ self.frozen.detach() * self.up.weight[:8].detach()[0]

    with offloading() as seen:
        model = offload_activations(Views().to(current_device()), **seen.options)
        model(_x()).sum().backward()
        # What `up` gets; the ReLU's result, which it and `down` save; and what is scaled.
        assert sorted(seen.left) == [4 * 8, 4 * 8, 4 * 24]


def _left_of_shards(spread: str) -> list[int]:
    torch.manual_seed(0)
    model = nn.Sequential(Line(), Line()).to(current_device())
    _SPREAD_OF_LINES[spread](model)
    with offloading() as seen:
        offload_activations(model, **seen.options)
        with torch.no_grad():
            model(_x())
        assert not seen.left
        model(_x()).sum().backward()
        return seen.left


_SPREAD_OF_LINES: Final[dict[str, Callable[[nn.Module], object]]] = {
    "nothing else": lambda model: None,
    "fully_shard": lambda model: fully_shard(model, policy={Line}),
    "as one": fully_shard,
    "bfloat16": lambda model: fully_shard(model, policy={Line}, mp_policy="bf16"),
    "replicate": replicate,
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_unsharded_and_replicated_parameters_never_leave(pool: Pool, ranks: int, device: str) -> None:
    need_devices(device, ranks)
    expected = [4 * 8, 4 * 24] * 2
    for spread in _SPREAD_OF_LINES:
        assert pool.run(ranks, _left_of_shards, spread, device=device) == [expected] * ranks, spread


@spmd(ranks=1)
def test_what_is_small_stays() -> None:
    with offloading() as seen:
        _line(**{**seen.options, "min_bytes": 4 * 24 * 4})(_x()).sum().backward()
        assert seen.left == [4 * 24], "4 bytes each: the input has fewer"
        seen.left.clear()
        wide = offload_activations(Square(), **{**seen.options, "min_bytes": 64})
        wide(_x(1, 8).requires_grad_().expand(1000, 8)).sum().backward()
        assert seen.left == [], "8 numbers, however often they are seen"


class Square(nn.Module):
    """Saves its input as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x


@spmd(ranks=1)
def test_tensors_come_back_with_their_strides() -> None:
    makers: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": lambda x: x.t(),
        "expanded": lambda x: x[:, :1].expand(16, 12),
        "channels last": lambda x: x.view(1, 4, 6, 8).to(memory_format=torch.channels_last),
        "every other": lambda x: x[::2, 1::3],
        "a corner": lambda x: x[-2:, -2:],
        "diagonal": lambda x: x.diagonal(),
        "a window": lambda x: x.unfold(1, 4, 2),
        "a number": lambda x: x[3, 5],
    }
    with offloading() as seen:
        module = offload_activations(Square(), **seen.options)
        for name, make in makers.items():
            x = _x(16, 12)
            saved = make(x).requires_grad_()
            y = module(saved)
            back = y.grad_fn._saved_self
            assert back.stride() == saved.stride(), name
            assert torch.equal(back, saved), name
            assert back.data_ptr() % 64 == saved.data_ptr() % 64, name
            y.sum().backward()
            assert torch.equal(saved.grad, 2 * make(x)), name
            seen.left.clear()
        y = module(_x(1000, 12)[3:5].requires_grad_())
        assert sum(seen.left) <= 2 * 12 + 128, "and not the other rows, which lie in the same memory"


@spmd(ranks=1)
def test_views_of_one_storage_leave_together() -> None:
    class Attention(nn.Module):
        def forward(self, qkv: Tensor) -> Tensor:
            q, k, v = qkv.chunk(3, -1)
            return F.softmax(q * k, -1) * v

    with offloading() as seen:
        plain, qkv = _x(4, 24).requires_grad_(), _x(4, 24).requires_grad_()
        Attention()(plain).sum().backward()
        offload_activations(Attention(), **seen.options)(qkv).sum().backward()
        assert torch.equal(plain.grad, qkv.grad)
        assert sorted(seen.left) == [4 * 8, 4 * 24], "what softmax returns, and all three"


class _IntoAHalf(torch.autograd.Function):
    """Times what a kernel that autograd does not know of puts into a half of some memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, half: Tensor, value: float) -> Tensor:
        half.data.fill_(value)
        ctx.save_for_backward(half.detach())
        return x * value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.saved_tensors[0], None, None


@spmd(ranks=1)
def test_halves_of_a_storage_that_are_written_one_after_the_other_leave_as_they_were_written() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            memory = x.detach().new_zeros(512)
            y = _IntoAHalf.apply(_IntoAHalf.apply(x, memory[:256], 2.0), memory[256:], 3.0)
            for _ in range(2 * AHEAD):  # so that neither is near any more
                y = y.sin()
            return y

    with offloading() as seen:
        plain, x = _x(256).requires_grad_(), _x(256).requires_grad_()
        Halves()(plain).sum().backward()
        offload_activations(Halves(), **seen.options)(x).sum().backward()
        assert torch.equal(plain.grad, x.grad)


def _line_under_autocast(model: nn.Module) -> None:
    with torch.autocast(current_device().type, dtype=torch.bfloat16):
        loss = model(_x()).float().sum()
    loss.backward()


@spmd(ranks=1)
def test_casts_of_parameters_by_autocast_stay() -> None:
    if current_device().type not in ("cpu", "cuda"):
        pytest.skip("the simulated accelerator has no autocast")
    with offloading() as seen:
        model = _line(**seen.options)
        _line_under_autocast(model)
        assert sorted(seen.left) == [4 * 8, 4 * 24], "the input, cast, and the ReLU's result"


@spmd(ranks=1)
def test_what_left_comes_back_once_and_the_last_ones_not_at_all() -> None:
    class Sines(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3 * AHEAD):
                x = x.sin()
            return x

    with offloading() as seen:
        offload_activations(Sines(), **seen.options)(_x(8).requires_grad_()).sum().backward()
        assert (len(seen.left), seen.brought) == (3 * AHEAD, 2 * AHEAD)


@spmd(ranks=1)
def test_what_several_read_waits_for_all_of_them_on_the_device() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2 * AHEAD):
                q, k, v = torch.cat([x, x, x], -1).sin().chunk(3, -1)
                x = F.softmax(q * k, -1) * v
            return x

    with offloading() as seen:
        offload_activations(Attention(), **seen.options)(_x(8, 8).requires_grad_()).sum().backward()
        assert seen.brought < len(seen.left)


@spmd(ranks=1)
def test_what_is_left_on_the_device_after_forward_is_little() -> None:
    with offloading() as seen:
        torch.manual_seed(0)
        model = nn.Sequential(*[Line() for _ in range(6)]).to(current_device())
        offload_activations(model, policy={Line}, **seen.options)
        made: list[Any] = []
        for line in model:
            line.up.register_forward_pre_hook(lambda module, args: made.append(_reference(args[0])))
            line.down.register_forward_pre_hook(lambda module, args: made.append(_reference(args[0])))
        loss = model(_x()).sum()
        assert len(seen.left) == 12
        assert sum(reference() is not None for reference in made) <= AHEAD
        loss.backward()
        assert seen.brought >= 12 - AHEAD
        assert not seen.alive


def _reference(tensor: Tensor) -> Any:
    return weakref.ref(tensor.untyped_storage())


# --- versions ---------------------------------------------------------------------------------------------------------


@spmd(ranks=1)
@pytest.mark.parametrize("annotated", [False, True])
@pytest.mark.parametrize("what", ["the input", "a view of the input", "the result", "a parameter"])
def test_what_was_written_to_since_raises_in_backward(what: str, annotated: bool) -> None:
    with offloading() as seen:
        model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()).to(current_device())
        if annotated:
            offload_activations(model, **seen.options)
        x = _x(4, 8).requires_grad_()
        entered = x * 1
        y = model(entered)
        if current_device().type != "cpu":
            torch.accelerator.synchronize()  # else the device would find a write to what is being copied
        with torch.no_grad():
            if what == "the input":
                entered.add_(1)
            elif what == "a view of the input":
                entered[0].mul_(2)
            elif what == "the result":
                y.add_(1)
            else:
                model[0].weight.mul_(2)
        words = r"has been modified by an inplace operation: \[\S*Float\S* \[\d, 8\]\]"
        with pytest.raises(RuntimeError, match=words) as caught:
            y.sum().backward()
        assert isinstance(caught.value, SavedTensorError) == annotated
        if annotated:
            assert re.search(r", which Sequential saved for backward, is at version \d; expected version \d", str(caught.value))
        del y, caught
        entered.sum().backward()  # an accelerator's thread has dropped the pass before that comes to its end
        assert not seen.alive


@spmd(ranks=2)
def test_a_step_between_a_forward_and_its_backward_raises_with_shards_too() -> None:
    with offloading() as seen:
        model = nn.Sequential(Line(), Line()).to(current_device())
        fully_shard(model, policy={Line})
        offload_activations(model, policy={Line}, **seen.options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first, second = model(_x()), model(_x())
        first.sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.sum().backward()


# --- goes wrong -------------------------------------------------------------------------------------------------------


class Fails(nn.Module):
    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x * x


def _fail_in_backward(gradient: Tensor) -> None:
    raise ValueError("as planned")


@spmd(ranks=2)
@pytest.mark.parametrize("spread", ["nothing else", "fully_shard", "checkpoint"])
@pytest.mark.parametrize("error", [ValueError("as planned"), KeyboardInterrupt("as planned")])
def test_a_forward_that_raises_leaves_nothing(spread: str, error: BaseException) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Line(), nn.Sequential(Line(), Fails()), Line()).to(current_device())
    with offloading() as seen:
        offload_activations(model, **seen.options)
        offload_activations(model[1], **seen.options)
        if spread == "fully_shard":
            fully_shard(model, policy={Line})
        if spread == "checkpoint":
            checkpoint(model, policy={nn.Sequential})
        expected = None
        for failure in (None, error, None):
            model[1][1].error = failure
            if failure is None:
                model(_x()).sum().backward()
                gradients = full_gradients(model)
                model.zero_grad()
                assert expected is None or all(torch.equal(expected[name], each) for name, each in gradients.items())
                expected = gradients
                continue
            with pytest.raises(type(failure)):
                model(_x())
            del failure
            error.__traceback__ = None
            x = _x().requires_grad_()
            y = x * x
            assert not seen.alive, "autograd saves for nobody but itself"
            del y


@spmd(ranks=2)
@pytest.mark.parametrize("spread", ["nothing else", "fully_shard"])
def test_a_backward_that_raises_leaves_nothing(spread: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Line(), Line(), Line()).to(current_device())
    with offloading() as seen:
        offload_activations(model, policy={Line}, **seen.options)
        if spread == "fully_shard":
            fully_shard(model, policy={Line})
        model(_x()).sum().backward()
        expected = full_gradients(model)
        model.zero_grad()
        handle = model[1].register_forward_hook(lambda module, args, y: y.register_hook(_fail_in_backward) and None)
        with pytest.raises(ValueError, match="as planned"):
            model(_x()).sum().backward()
        handle.remove()
        model.zero_grad()
        model(_x()).sum().backward()
        assert not seen.alive
        assert all(torch.equal(expected[name], each) for name, each in full_gradients(model).items())


# --- other ways through autograd --------------------------------------------------------------------------------------


@spmd(ranks=1)
def test_gradients_of_gradients_are_the_same() -> None:
    def penalty(model: nn.Module) -> list[Tensor]:
        x = _x().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    with offloading() as seen:
        model = _line(**seen.options)
        found = penalty(model)
        assert seen.left
        remove(model, offload_activations).zero_grad()
        assert all(torch.equal(*pair) for pair in zip(found, penalty(model), strict=True))
        assert not seen.alive


@spmd(ranks=1)
@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_own_checkpointing_goes_around_and_inside(reentrant: bool) -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = Line()

        def forward(self, x: Tensor) -> Tensor:
            return torch_checkpoint(self.line, x * x, use_reentrant=reentrant)

    def run(model: nn.Module) -> list[Tensor]:
        x = _x().requires_grad_()
        if reentrant:
            model(x).sum().backward()  # what is inside would see no inputs that need gradients
        else:
            torch_checkpoint(model, x, use_reentrant=False).sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    with offloading() as seen:
        results = []
        for annotated in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(Line(), Inside(), Line()).to(current_device())
            if annotated:
                offload_activations(model, **seen.options)
            results.append(run(model))
        assert seen.left
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        assert not seen.alive


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return x.mul_(0).add_(y).mul_(gradient), y.mul_(0) + gradient  # in their own memory, as some kernels do


class Greedy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = _Scaled.apply(x.cos(), x.sin()) * x.sin()
        for _ in range(AHEAD):  # what is near is what forward made, as without offload
            y = y.sin()
        return y


@spmd(ranks=1)
def test_functions_that_write_to_what_they_saved_get_memory_that_is_theirs_in_a_second_backward() -> None:
    with offloading() as seen:
        x = _x().requires_grad_()
        y = offload_activations(Greedy(), **seen.options)(x).sum()
        y.backward(retain_graph=True)
        first, x.grad = x.grad, None
        y.backward()
        assert torch.equal(first, x.grad)


@spmd(ranks=1)
def test_forwards_without_gradients_copy_nothing() -> None:
    with offloading() as seen:
        model = _line(**seen.options)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                model(_x())
        model.requires_grad_(False)(_x())
        assert not seen.left


@spmd(ranks=1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_modules_keep_what_they_save_on_the_host(backend: str) -> None:
    torch._dynamo.reset()
    with offloading() as seen:
        results = []
        for annotated in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(Line(), Line()).to(current_device())
            if annotated:
                offload_activations(model, policy={Line}, **seen.options)
            for line in model:
                line.compile(backend=backend)
            for _ in range(2):
                model.zero_grad()
                model(_x()).sum().backward()
            results.append([p.grad for p in model.parameters()])
        assert seen.left
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        assert not seen.alive
    torch._dynamo.reset()


# --- the verb ---------------------------------------------------------------------------------------------------------


def test_on_a_cpu_nothing_is_copied_and_describe_says_so() -> None:
    model = nn.Sequential(Line(), Line())
    assert offload_activations(model, policy={Line}, min_bytes=0) is model
    seen: list[object] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        model(torch.randn(4, 8)).sum().backward()
    assert seen, "nobody stands before the hooks around"
    assert "offload_activations: nothing is copied where modules are on the CPU: 0, 1" in str(describe(model))
    assert describe(model).to_dict()["elsewhere"] == {"offload_activations": ["0", "1"]}


@pytest.mark.parametrize("there", [True, False])
def test_describe_says_so_of_modules_that_are_nowhere_yet_only_without_an_accelerator(there: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Line(), nn.Softmax(-1))
    offload_activations(model, policy={Line, nn.Softmax})
    with mock.patch("composable.report.describe.any_has_streams", return_value=there):
        assert describe(model).to_dict()["not_offloaded"] == ([] if there else ["0", "1"])


@spmd(ranks=1)
def test_remove_undoes_it() -> None:
    with offloading() as seen:
        model = nn.Sequential(Line(), Line()).to(current_device())
        offload_activations(model, policy={Line}, **seen.options)
        assert [list(registry(line)) for line in model] == [["offload_activations"]] * 2
        assert not registry(model)
        for line in model:
            remove(line, offload_activations)
            assert not registry(line)
            assert not line._forward_hooks
            assert not line._forward_pre_hooks
        model(_x()).sum().backward()
        assert not seen.left


def _pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


@spmd(ranks=1)
@pytest.mark.parametrize("twin", [copy.deepcopy, _pickled])
def test_copies_of_a_module_offload_for_themselves(twin: Callable[[nn.Module], nn.Module]) -> None:
    with offloading() as seen:
        model = _line(**seen.options)
        other = twin(model)
        model(_x()).sum().backward()
        count = len(seen.left)
        other(_x()).sum().backward()
        assert len(seen.left) == 2 * count
        assert not seen.alive


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_bytes": -1}, "offload_activations: min_bytes must be a number of bytes, 0 or more, got -1"),
        ({"min_bytes": 1.5}, "offload_activations: min_bytes must be a number of bytes, 0 or more, got 1.5"),
        ({"min_bytes": True}, "offload_activations: min_bytes must be a number of bytes, 0 or more, got True"),
        ({"pin_memory": "yes"}, "offload_activations: pin_memory must be True or False, got 'yes'"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    model = Line()
    with pytest.raises(AnnotationError) as caught:
        offload_activations(model, **options)
    assert str(caught.value) == message
    assert not registry(model)
    assert not model._forward_hooks

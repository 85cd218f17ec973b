"""Ordinary programs, each with what a second run of its modules would get wrong or would leave, and
a machine that computes wrongly, for `watch(model, repeat=True)`.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations
from torch.optim import LBFGS, SGD, Optimizer

from composable import checkpoint, fully_shard, no_sync, offload_activations
from composable.extras.watch import repeat as repeated
from tests.helpers.world import current_device

WIDTH: Final = 8
BLOCKS: Final = 2
STEPS: Final = 4
LOG: Final[list[Any]] = []  # what modules do to the world around them
_NUMBERS = count()


class Block(nn.Module):
    """Computes by a function of itself, its linear layers, and an input."""

    table: Tensor

    def __init__(self, how: Callable[[Any, Tensor], Tensor], make: Callable[[Any], None]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(WIDTH))
        self.calls = 0
        self.how = how
        make(self)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.how(self, x)


def _nothing(_: Any) -> None: ...


def _linear(block: Any, x: Tensor) -> Tensor:
    y: Tensor = block.two(block.one(x).tanh())
    return y


# --- what modules do -----------------------------------------------------------------------------


def _add(name: str, make: Callable[[], nn.Module]) -> Callable[[Any], None]:
    return lambda block: setattr(block, name, make())


def _inner(block: Any, x: Tensor) -> Tensor:
    y: Tensor = block.inner(_linear(block, x))
    return y


def _batched(block: Any, x: Tensor) -> Tensor:
    y: Tensor = block.inner(_linear(block, x).flatten(0, 1)).view_as(x)
    return y


def _python_random(block: Any, x: Tensor) -> Tensor:
    return x if random.random() < 0.5 else _linear(block, x)


def _numpy_random(block: Any, x: Tensor) -> Tensor:
    return _linear(block, x) * float(np.random.rand())


def _attention(block: Any, x: Tensor) -> Tensor:
    q, k = block.one(x).unflatten(-1, (2, -1)).transpose(1, 2), block.two(x)
    k = k.unflatten(-1, (2, -1)).transpose(1, 2)
    drop = 0.1 if block.training else 0.0
    y = F.scaled_dot_product_attention(q, k, k, is_causal=True, dropout_p=drop)
    return y.transpose(1, 2).flatten(2)


def _attention_in_scope(block: Any, x: Tensor) -> Tensor:
    with sdpa_kernel([SDPBackend.MATH]):
        return _attention(block, x)


def _autocast(block: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return _linear(block, x)


def _counter(block: Any, x: Tensor) -> Tensor:
    block.calls += 1
    return _linear(block, x) * block.calls


def _global_once(block: Any, x: Tensor) -> Tensor:
    LOG.append("called")
    return _linear(block, x) * (1 if len(LOG) < 2 else 0.5)


def _iterator(block: Any, x: Tensor) -> Tensor:
    return _linear(block, x) / (1 + next(_NUMBERS))


def _rotary(block: Any, x: Tensor) -> Tensor:
    cache = block.__dict__.setdefault("cache", {})
    if x.shape[1] not in cache:
        LOG.append("filled")
        cache[x.shape[1]] = torch.arange(x.shape[1], device=x.device)[:, None].cos()
    return _linear(block, x) * cache[x.shape[1]]


def _buffer(block: Any, x: Tensor) -> Tensor:
    block.table.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
    return _linear(block, x) * block.table.clone()


def _in_place(block: Any, x: Tensor) -> Tensor:
    y = block.one(x)
    y += x
    y.mul_(2).relu_()
    return F.relu(block.two(y), inplace=True)


def _input_in_place(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x.detach().mul_(0.5)  # the value, behind autograd's back
    return _linear(block, x)


def _checkpointed(reentrant: bool, block: Any, x: Tensor) -> Tensor:
    y: Tensor = torch_checkpoint.checkpoint(
        lambda inner: block.two(inner.tanh()), block.one(x), use_reentrant=reentrant
    )
    return y


def _selective(block: Any, x: Tensor) -> Tensor:
    saved = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
    context = partial(torch_checkpoint.create_selective_checkpoint_contexts, saved)
    run: Any = torch_checkpoint.checkpoint
    y: Tensor = run(partial(_linear, block), x, use_reentrant=False, context_fn=context)
    return y


def _tensor_hook(block: Any, x: Tensor) -> Tensor:
    y = block.one(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: LOG.append(float(gradient.sum())))
    z: Tensor = block.two(y.tanh())
    return z


def _layer_drop(block: Any, x: Tensor) -> Tensor:
    return _linear(block, x) if torch.rand(()) < 0.7 else x * 0


def _experts(block: Any, x: Tensor) -> Tensor:
    scores = block.one(x) + torch.randn_like(x) * 0.1
    weights, picked = scores.softmax(-1).topk(2, -1)
    y = block.two(x).gather(-1, picked) * weights
    z: Tensor = torch.zeros_like(x).scatter_add(-1, picked, y)
    return z.index_add(0, torch.zeros(1, dtype=torch.long, device=x.device), z[:1])


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        LOG.append("forward")
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        LOG.append("backward")
        return gradient * (2 if len(LOG) % 2 else 2.5)


def _function(block: Any, x: Tensor) -> Tensor:
    y: Tensor = block.two(_Scaled.apply(block.one(x)))  # type: ignore[no-untyped-call]
    return y


def _tied(block: Any, x: Tensor) -> Tensor:
    return F.linear(block.one(x), block.one.weight)


def _twice(block: Any, x: Tensor) -> Tensor:
    return _linear(block, _linear(block, x))


def _nested(block: Any, x: Tensor) -> Tensor:
    def parts(given: dict[str, Any]) -> Iterator[Tensor]:
        yield from given["these"]

    block.kept = {"these": [block.one(x), (block.two(x),)]}
    first, (second,) = parts(block.kept)
    return first * second.tanh()


def _mapped(block: Any, x: Tensor) -> Tensor:
    y: Tensor = torch.vmap(lambda row: block.one(row).sin())(x)
    return y


def _penalty(block: Any, x: Tensor) -> Tensor:
    y = _linear(block, x)
    if not y.requires_grad:
        return y
    z = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(_linear(block, z).square().sum(), z, create_graph=True)
    return y + slope


def _fourier(block: Any, x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(_linear(block, x)) * 1j, n=WIDTH)


def _half_frozen(block: Any) -> None:
    block.one.requires_grad_(False)


def _recurrent(block: Any, x: Tensor) -> Tensor:
    y: Tensor = block.inner(_linear(block, x))[0]
    return y


def _convolved(block: Any, x: Tensor) -> Tensor:
    y: Tensor = block.inner(_linear(block, x).transpose(1, 2)).transpose(1, 2)
    return y


def _attended(block: Any, x: Tensor) -> Tensor:
    y: Tensor = block.inner(x, x, _linear(block, x), need_weights=False)[0]
    return y


def _embedded(block: Any, x: Tensor) -> Tensor:
    indices = (x.detach().sum(-1).abs() * 7).long() % WIDTH
    return _linear(block, x) + F.embedding(indices, block.two.weight)


def _hooked(block: Any) -> None:
    def note(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        LOG.append(float(output.detach().sum()))
        return output * (2 if len(LOG) % 3 else 1)

    block.one.register_forward_hook(note)
    block.register_forward_pre_hook(lambda module, args: LOG.append("before"))


def _sorted(block: Any, x: Tensor) -> Tensor:
    y = _linear(block, x)
    values, order = y.sort(-1)
    return values.cumsum(-1).gather(-1, order) + y.cummax(-1).values + torch.where(y > 0, y, -y)


def _einsum(block: Any, x: Tensor) -> Tensor:
    return torch.einsum("btd,de->bte", x, block.one.weight) + _linear(block, x).pow(3).std()


def _raises(block: Any, x: Tensor) -> Tensor:
    block.calls += 1
    y = _linear(block, x)
    if block.calls % 2:
        raise ArithmeticError
    return y


def _uninitialised(block: Any, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y.copy_(_linear(block, x))
    return torch.cat([y[..., :1], y.new_zeros(*y.shape[:-1], WIDTH - 1)], -1)


# --- how a step is trained -----------------------------------------------------------------------


def _step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _under(scope: Callable[[], AbstractContextManager[Any]], *, backward: bool = True) -> Any:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        with scope():
            loss = model(x).square().mean()
            if backward:
                loss.backward()
        if not backward:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _no_mkldnn() -> Iterator[None]:
    with warnings.catch_warnings():  # of hardware that is not there
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def _eval_before(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    model.train()
    model(x).square().mean().backward()
    model.eval()
    with torch.no_grad():
        model(x)
    optimizer.step()
    optimizer.zero_grad()


def _closure(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def _accumulating(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    with no_sync(model):
        model(x).square().mean().backward()
    _step(model, optimizer, x)


def _several_forwards(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    (model(x).square().mean() + model(x.cos()).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


def _several_backwards(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    y = model(x)
    y.square().mean().backward(retain_graph=True)
    y.mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _projected(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(0.99)
    optimizer.step()
    optimizer.zero_grad()


def _input_written_later(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    x.zero_()
    optimizer.step()
    optimizer.zero_grad()


def _tried_again(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    for _ in range(BLOCKS + 1):
        try:
            return _step(model, optimizer, x)
        except ArithmeticError:
            LOG.append("again")
    return None


_SGD: Final = partial(SGD, lr=0.05)


@dataclass(frozen=True)
class Kind:
    """An ordinary program.

    Attributes:
        how: its blocks compute.
        make: adds to a block.
        step: trains a step.
        optimizer: makes one.
        before: annotates a block, before the model is sharded.
    """

    how: Callable[[Any, Tensor], Tensor] = _linear
    make: Callable[[Any], None] = _nothing
    step: Callable[[nn.Module, Optimizer, Tensor], None] = _step
    optimizer: Callable[..., Optimizer] = _SGD
    before: Callable[[nn.Module], object] = _nothing


def _bfloat16() -> Any:
    return torch.autocast(current_device().type, torch.bfloat16)


KINDS: Final[dict[str, Kind]] = {
    "linear": Kind(),
    "dropout": Kind(_inner, _add("inner", lambda: nn.Dropout(0.5))),
    "batch norm": Kind(_batched, _add("inner", lambda: nn.BatchNorm1d(WIDTH))),
    "batch norm in eval": Kind(_batched, _add("inner", lambda: nn.BatchNorm1d(WIDTH).eval())),
    "layer norm": Kind(_inner, _add("inner", lambda: nn.LayerNorm(WIDTH))),
    "rms norm": Kind(_inner, _add("inner", lambda: nn.RMSNorm(WIDTH))),
    "group norm": Kind(_batched, _add("inner", lambda: nn.GroupNorm(2, WIDTH))),
    "python's random": Kind(_python_random),
    "numpy's random": Kind(_numpy_random),
    "attention": Kind(_attention),
    "attention's kernels in a scope in the module": Kind(_attention_in_scope),
    "attention's kernels in a scope": Kind(
        _attention, step=_under(lambda: sdpa_kernel([SDPBackend.MATH]))
    ),
    "autocast": Kind(step=_under(_bfloat16, backward=False)),
    "autocast in the module": Kind(_autocast),
    "mkldnn off": Kind(step=_under(_no_mkldnn)),
    "a default dtype": Kind(step=_under(_default_dtype, backward=False)),
    "deterministic": Kind(step=_under(_deterministic)),
    "evaluation before the step": Kind(
        _inner, _add("inner", lambda: nn.Dropout(0.5)), step=_eval_before
    ),
    "a counter": Kind(_counter),
    "a global that changes once": Kind(_global_once),
    "an iterator": Kind(_iterator),
    "a cache": Kind(_rotary),
    "a buffer": Kind(_buffer),
    "in place": Kind(_in_place),
    "its input in place": Kind(_input_in_place),
    "spectral norm": Kind(_inner, _add("inner", lambda: parametrizations.spectral_norm(_square()))),
    "weight norm": Kind(_inner, _add("inner", lambda: parametrizations.weight_norm(_square()))),
    "checkpoint in the module": Kind(partial(_checkpointed, False)),
    "reentrant checkpoint in the module": Kind(partial(_checkpointed, True)),
    "selective checkpoint in the module": Kind(_selective),
    "a checkpointed unit": Kind(_counter, before=checkpoint),
    "offloaded activations": Kind(before=offload_activations),
    "hooks": Kind(make=_hooked),
    "tensor hooks": Kind(_tensor_hook),
    "a closure": Kind(step=_closure),
    "several evaluations of a closure": Kind(
        step=_closure, optimizer=partial(LBFGS, lr=0.01, max_iter=3)
    ),
    "accumulation": Kind(_counter, step=_accumulating),
    "several forwards": Kind(_counter, step=_several_forwards),
    "several backwards": Kind(_tensor_hook, step=_several_backwards),
    "layer drop": Kind(_layer_drop),
    "experts with noise": Kind(_experts),
    "an autograd function": Kind(_function),
    "weights that are projected": Kind(step=_projected),
    "an input that is written to later": Kind(step=_input_written_later),
    "frozen parts": Kind(make=_half_frozen),
    "tied weights": Kind(_tied),
    "called twice": Kind(_twice),
    "containers and generators": Kind(_nested),
    "vmap": Kind(_mapped),
    "gradients in the forward": Kind(_penalty),
    "complex numbers": Kind(_fourier),
    "lstm": Kind(_recurrent, _add("inner", lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True))),
    "convolution": Kind(_convolved, _add("inner", lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1))),
    "multi-head attention": Kind(
        _attended, _add("inner", lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True))
    ),
    "embedding": Kind(_embedded),
    "sorts and sums": Kind(_sorted),
    "einsum": Kind(_einsum),
    "forwards that raise": Kind(_raises, step=_tried_again),
    "memory that is not filled": Kind(_uninitialised),
}


def _square() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def trained(kind: Kind, scope: Callable[[nn.Module], Any] = lambda _: nullcontext()) -> Any:
    """Train a model of this kind. Returns all that it leaves, and what `scope` gave."""
    global _NUMBERS
    rank = dist.get_rank()
    LOG.clear()
    _NUMBERS = count()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(kind.how, kind.make) for _ in range(BLOCKS))).to(current_device())
    for block in model:
        kind.before(block)
    fully_shard(model, policy={Block})
    optimizer = kind.optimizer([each for each in model.parameters() if each.requires_grad])
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1 + rank)
    with scope(model) as given:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step * 10 + rank)
            x = torch.randn(3, 4, WIDTH, generator=generator).to(current_device())
            kind.step(model, optimizer, x)
    tensors = [*model.parameters(), *model.buffers()]
    local = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    left = [each.detach().cpu().numpy().tobytes() for each in local]
    drawn = torch.get_rng_state().numpy().tobytes(), random.random(), np.random.rand()
    return (left, list(LOG), [each.calls for each in model], drawn), given


# --- a machine that computes wrongly -------------------------------------------------------------


class _Wrong:
    """An operator whose first call has one bit that is wrong."""

    def __init__(self, func: Any) -> None:
        self._func, self._is_first = func, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._func, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._func(*args, **kwargs)
        if self._is_first:
            self._is_first = False
            flip(output)
        return output


def flip(output: Any) -> None:
    """Flip the lowest bit of the first value."""
    tensor = output if isinstance(output, Tensor) else output[0]
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.view(kind)
    bits[(0,) * bits.dim()] ^= 1


class Machine:
    """While it is patched in, it counts the operators that run again, and spoils one of them.

    Attributes:
        names: of those that have run again.
        wrong: the number of the one that is spoiled.
    """

    def __init__(self, wrong: int = -1) -> None:
        self.names: list[str] = []
        self.wrong = wrong

    @contextmanager
    def running(self) -> Iterator[Machine]:
        run, made = repeated._Twice.__torch_dispatch__, repeated._Twice._compare
        machine = self

        def dispatched(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            is_next = len(machine.names) == machine.wrong and repeated._written_by(func) is not None
            return run(self, _Wrong(func) if is_next else func, types, args, kwargs)

        def compared(self: Any, func: Any, first: Any, again: Any) -> None:
            phase = "backward" if repeated.in_backward() else "forward"
            machine.names.append(f"{func.overloadpacket} in {phase}")
            made(self, func, first, again)

        with (
            mock.patch.object(repeated._Twice, "__torch_dispatch__", dispatched),
            mock.patch.object(repeated._Twice, "_compare", compared),
        ):
            yield self

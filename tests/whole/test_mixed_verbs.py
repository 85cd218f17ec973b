"""`replicate` and `fully_shard` on one model: torch's own functions over all parameters do what they do in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard

import composable
from composable import checkpoint, fully_shard, remove, replicate, step_on_shards
from composable.errors import OptimizerError
from tests.helpers.compare import full
from tests.helpers.world import Pool, current_device, need_devices, spmd

WIDTH: Final = 8  # no rank of four has an empty shard, of which torch can take no largest element
WORDS: Final = 9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())  # type: ignore[no-any-return]


class Model(nn.Module):
    """Reads its embedding twice: by a call, and as the weight of a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.norm = nn.LayerNorm(WIDTH)

    def features(self, tokens: Tensor) -> Tensor:
        x = tokens if tokens.is_floating_point() else self.tok_emb(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) * self.scale  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor) -> Tensor:
        """Of numbers in place of tokens: what uses neither the embedding nor the head."""
        x = self.features(tokens)
        return x if tokens.is_floating_point() else F.linear(x, self.tok_emb.weight)


def in_the_readme(model: Model) -> None:
    replicate(model.tok_emb)
    fully_shard(model, policy={Block})


def shards_inside_replicated(model: Model) -> None:
    for block in model.blocks:
        fully_shard(block)
    replicate(model)


def replicated_in_a_unit(model: Model) -> None:
    replicate(model.tok_emb)
    replicate(model.blocks[0].up)  # type: ignore[arg-type]
    fully_shard(model, policy={Block})


def on_several_floors(model: Model) -> None:
    replicate(model.tok_emb)
    replicate(model.blocks[1].norm)  # type: ignore[arg-type]
    fully_shard(model.blocks[1])
    replicate(model)


def with_checkpointing(model: Model) -> None:
    checkpoint(model, policy={Block})
    in_the_readme(model)


MIXES: Final[dict[str, Callable[[Model], None]]] = {
    mix.__name__: mix
    for mix in (in_the_readme, shards_inside_replicated, replicated_in_a_unit, on_several_floors, with_checkpointing)
}


def make_model(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    return Model().to(current_device(), dtype)


def twins(mix: str) -> tuple[Model, Model]:
    """A plain model, and the same one annotated."""
    models = make_model(), make_model()
    MIXES[mix](models[1])
    return models


def batch_of(step: int) -> Tensor:
    """All ranks' tokens, one row per rank."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, WORDS, (dist.get_world_size(), 5), generator=generator).to(current_device())


def losses(plain: nn.Module, mixed: nn.Module, step: int) -> tuple[Tensor, Tensor]:
    """The loss of one process on the whole batch, and this rank's on its share."""
    batch, rank = batch_of(step), dist.get_rank()
    return plain(batch).square().mean(), mixed(batch[rank : rank + 1]).square().mean()


def assert_alike(plain: nn.Module, mixed: nn.Module, what: str, of: Callable[[Tensor], Tensor | None] = lambda p: p) -> None:
    for (name, one), other in zip(plain.named_parameters(), mixed.parameters(), strict=True):
        expected, actual = of(one), of(other)
        assert (expected is None) == (actual is None), f"{what}: {name}"
        if expected is not None and actual is not None:
            torch.testing.assert_close(
                full(actual), expected, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{what}: {name}: {text}"
            )


def gradient(parameter: Tensor) -> Tensor | None:
    return parameter.grad


def kinds(model: nn.Module) -> list[str]:
    """What each parameter is, in short."""
    return [str(p.placements) if isinstance(p, DTensor) else "plain" for p in model.parameters()]


# --- torch's own functions --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """An optimizer of torch, and what is done around its steps."""

    make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    scaled: bool = False
    clip: Callable[..., Any] | None = None
    clipping: dict[str, Any] = field(default_factory=dict)
    set_to_none: bool = True


_stock_clip: Final = nn.utils.clip_grad_norm_

RECIPES: Final[dict[str, Recipe]] = {
    "AdamW": Recipe(lambda ps: torch.optim.AdamW(ps, lr=0.05), clip=_stock_clip),
    "AdamW(foreach=True)": Recipe(
        lambda ps: torch.optim.AdamW(ps, lr=0.05, foreach=True), clip=_stock_clip, clipping={"foreach": True}, set_to_none=False
    ),
    "AdamW(foreach=False)": Recipe(
        lambda ps: torch.optim.AdamW(ps, lr=0.05, foreach=False), clip=_stock_clip, clipping={"foreach": False}
    ),
    "AdamW(fused=True)": Recipe(
        lambda ps: torch.optim.AdamW(ps, lr=0.05, fused=True), clip=_stock_clip, clipping={"norm_type": float("inf")}
    ),
    "SGD(foreach=True)": Recipe(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True)),
    "GradScaler, unscaled and clipped": Recipe(lambda ps: torch.optim.AdamW(ps, lr=0.05), scaled=True, clip=_stock_clip),
    "GradScaler and a fused step": Recipe(lambda ps: torch.optim.AdamW(ps, lr=0.05, fused=True), scaled=True),
    "our clipping": Recipe(lambda ps: torch.optim.AdamW(ps, lr=0.05), clip=composable.clip_grad_norm_),
}


def _train(plain: Model, mixed: Model, recipe: Recipe, steps: int = 4) -> None:
    models = plain, mixed
    optimizers = [recipe.make(model.parameters()) for model in models]
    kind = current_device().type
    scalers = [torch.amp.GradScaler(kind, init_scale=8.0, enabled=recipe.scaled) for _ in models]
    for step in range(steps):
        for scaler, loss in zip(scalers, losses(plain, mixed, step), strict=True):
            scaler.scale(loss).backward()
        norms = []
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            if recipe.clip is not None:
                scaler.unscale_(optimizer)
                norms.append(full(recipe.clip(model.parameters(), 0.1, **recipe.clipping)))
            scaler.step(optimizer)
            scaler.update()
        if norms:
            torch.testing.assert_close(norms[1].to(norms[0]), norms[0], msg="the norm counts each parameter once")
            assert norms[0] > 0.1
        assert_alike(plain, mixed, f"gradients of step {step}", gradient)
        assert_alike(plain, mixed, f"parameters after step {step}")
        if step != 1:  # what is there then is added to
            for optimizer in optimizers:
                optimizer.zero_grad(recipe.set_to_none)


def _train_all(mix: str) -> None:
    for name, recipe in RECIPES.items():
        plain, mixed = twins(mix)
        assert "plain" not in kinds(mixed)
        try:
            _train(plain, mixed, recipe)
        except Exception as error:
            error.add_note(name)
            raise


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_torchs_optimizers_clipping_and_scalers_do_what_they_do_in_one_process(
    pool: Pool, mix: str, ranks: int, device: str
) -> None:
    need_devices(device, ranks)
    pool.run(ranks, _train_all, mix, device=device)


def test_a_group_of_one_rank_has_the_same_forms(pool: Pool, device: str) -> None:
    need_devices(device, 1)
    pool.run(1, _train_all, "in_the_readme", device=device)


@spmd(ranks=2)
def test_a_step_on_shards_has_the_same_bits() -> None:
    models = [twins("in_the_readme")[1] for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in models]
    step_on_shards(optimizers[1])
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(batch_of(step)).square().mean().backward()
            optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())  # type: ignore[attr-defined]


@pytest.mark.parametrize("mix", ["in_the_readme", "fully_shard alone"])
@spmd(ranks=[2, 4])
def test_all_ranks_skip_a_step_when_one_ranks_shard_of_a_gradient_is_infinite(mix: str) -> None:
    """torch asks the other ranks only if the first gradient is cut."""
    model = make_model()
    if mix == "fully_shard alone":
        fully_shard(model)
        parameters = [model.scale, *(p for p in model.parameters() if p is not model.scale)]
    else:
        MIXES[mix](model)
        parameters = list(model.parameters())
    assert isinstance(parameters[0], DTensor)
    assert parameters[0].placements == (Replicate(),)
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    scaler = torch.amp.GradScaler(current_device().type, init_scale=8.0)
    for step in range(dist.get_world_size() + 1):
        scaler.scale(model(batch_of(step)).square().mean()).backward()
        bad = step == dist.get_rank() + 1
        weight = model.blocks[0].up.weight  # type: ignore[union-attr]
        if bad:
            weight.grad.to_local().view(-1)[0] = torch.inf  # type: ignore[union-attr,attr-defined]
        before = [full(parameter) for parameter in parameters]
        scaler.step(optimizer)
        scaler.update()
        after = [full(parameter) for parameter in parameters]
        skipped = all(map(torch.equal, before, after))
        assert skipped == (step > 0)
        assert scaler.get_scale() == 8.0 / 2**step
        optimizer.zero_grad()


# --- which parameters are what ----------------------------------------------------------------------------------------


@spmd(ranks=2)
def test_only_an_annotation_over_both_makes_replicated_parameters_dtensors() -> None:
    model = make_model()
    original = model.tok_emb.weight
    replicate(model.tok_emb)
    assert model.tok_emb.weight is original, "replicated models keep their own plain parameters"
    for block in model.blocks:
        fully_shard(block)
    assert model.tok_emb.weight is original, "nothing is around both"
    fully_shard(model)
    weight = model.tok_emb.weight
    assert isinstance(weight, DTensor)
    assert weight.placements == (Replicate(),)
    assert weight.device_mesh is model.scale.device_mesh  # type: ignore[attr-defined]
    assert weight.to_local().data_ptr() == original.data_ptr(), "no second copy"
    remove(model, fully_shard)
    assert model.tok_emb.weight is original


@spmd(ranks=2)
def test_the_order_of_annotations_does_not_matter() -> None:
    def embedding_last(model: Model) -> None:
        for block in model.blocks:
            fully_shard(block)
        replicate(model.tok_emb)
        fully_shard(model)

    one, other = make_model(), make_model()
    in_the_readme(one)
    embedding_last(other)
    assert kinds(one) == kinds(other)


@spmd(ranks=2)
def test_removing_the_inner_of_two_annotations_around_both_leaves_dtensors() -> None:
    model = nn.Sequential(make_model(), nn.Linear(WORDS, 2, dtype=torch.float64, device=current_device()))
    in_the_readme(model[0])  # type: ignore[arg-type]
    fully_shard(model)
    model(batch_of(0)).sum().backward()
    remove(model, fully_shard)
    assert isinstance(model[0].tok_emb.weight, DTensor)  # type: ignore[union-attr]
    remove(model[0], fully_shard)
    assert kinds(model) == ["plain"] * len(list(model.parameters()))


@pytest.mark.parametrize("mix", MIXES)
@spmd(ranks=2)
def test_whatever_is_removed_first_plain_parameters_and_gradients_come_back(mix: str) -> None:
    for first in (replicate, fully_shard):
        plain, mixed = twins(mix)
        for loss in losses(plain, mixed, 0):
            loss.backward()
        verbs = [first, fully_shard if first is replicate else replicate]
        for verb in verbs:
            for module in mixed.modules():
                if verb.__name__ in composable.registry(module):
                    remove(module, verb)
        assert kinds(mixed) == ["plain"] * len(list(mixed.parameters()))
        assert_alike(plain, mixed, "parameters")
        assert_alike(plain, mixed, "gradients", gradient)
        for loss in losses(plain, mixed, 1):
            loss.backward()


@spmd(ranks=2)
def test_a_verb_that_fails_leaves_plain_parameters() -> None:
    model = make_model()
    before = list(model.parameters())
    replicate(model.tok_emb)

    def refuse(parameter: nn.Parameter) -> Shard:
        raise MemoryError

    with pytest.raises(MemoryError):
        fully_shard(model, shard_placement_fn=refuse)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    fully_shard(model)
    assert "plain" not in kinds(model)


@spmd(ranks=4)
def test_replicas_of_other_ranks_than_the_shards_are_left_plain() -> None:
    """Half of the ranks hold what is replicated: on a mesh of all ranks it is not the same everywhere."""
    half = dist.new_group([0, 1]), dist.new_group([2, 3])
    model = make_model()
    replicate(model.tok_emb, mesh=half[dist.get_rank() // 2])
    fully_shard(model)
    assert kinds(model)[1] == "plain"
    assert "plain" not in kinds(model)[2:]


# --- what modules compute with ----------------------------------------------------------------------------------------


@spmd(ranks=2)
def test_modules_and_methods_inside_a_replicated_one_work_by_themselves() -> None:
    plain, mixed = twins("shards_inside_replicated")
    batch, rank = batch_of(0), dist.get_rank()
    plain.features(batch).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        mixed.features(batch[rank : rank + 1])  # its own parameter, read while nothing was called
    mixed.zero_grad()
    composable.register_forward_method(mixed, "features")
    mixed.features(batch[rank : rank + 1]).square().mean().backward()
    assert_alike(plain, mixed, "gradients", gradient)
    plain.zero_grad()
    mixed.zero_grad()
    x = torch.linspace(-1, 1, WIDTH, dtype=torch.float64, device=current_device())
    for model in (plain, mixed):
        model.norm(x).sum().backward()
        with pytest.raises(RuntimeError, match="shape"):
            model.norm(x[1:])
    assert_alike(plain, mixed, "gradients of one module", gradient)
    assert "plain" not in kinds(mixed)


@spmd(ranks=2)
def test_ranks_that_leave_parameters_out_and_parameters_that_freeze() -> None:
    plain, mixed = twins("shards_inside_replicated")
    numbers = torch.linspace(-1, 1, WIDTH, dtype=torch.float64, device=current_device()).view(1, 1, WIDTH)
    for step, frozen in enumerate([False, True, False]):
        for model in (plain, mixed):
            model.tok_emb.weight.requires_grad_(not frozen)
            model.zero_grad()
        inputs = numbers, batch_of(step)[:1]  # by rank
        for each in inputs:
            (plain(each).square().mean() / 2).backward()
        mixed(inputs[dist.get_rank()]).square().mean().backward()
        assert_alike(plain, mixed, f"gradients of step {step}", gradient)
        for model in (plain, mixed):
            model.zero_grad()
        plain(numbers).square().mean().backward()
        mixed(numbers).square().mean().backward()
        assert_alike(plain, mixed, "gradients of what no rank used", gradient)


# --- gradients --------------------------------------------------------------------------------------------------------


@spmd(ranks=2)
def test_gradients_stay_in_their_buckets_and_kept_ones_do_not_change() -> None:
    _, mixed = twins("in_the_readme")
    weight = mixed.tok_emb.weight
    addresses, kept, copies = [], [], []
    for step in range(6):
        mixed(batch_of(step)).square().mean().backward()
        assert isinstance(weight.grad, DTensor)
        addresses.append(weight.grad.to_local().data_ptr())
        if step == 3:
            kept.append(weight.grad)
            copies.append(full(weight.grad))
        mixed.zero_grad()
    assert addresses[0] == addresses[1] == addresses[3]
    assert addresses[4] != addresses[3]
    assert torch.equal(full(kept[0]), copies[0])


@pytest.mark.parametrize("set_to_none", [True, False])
@spmd(ranks=2)
def test_gradients_cleared_between_forward_and_backward_are_not_added(set_to_none: bool) -> None:
    plain, mixed = twins("in_the_readme")
    for step in range(3):
        pair = losses(plain, mixed, step)
        for model in (plain, mixed):
            model.zero_grad(set_to_none)
        for loss in pair:
            loss.backward()
        assert_alike(plain, mixed, f"gradients of step {step}", gradient)


@spmd(ranks=2)
def test_nothing_of_a_backward_that_raised_is_left() -> None:
    plain, mixed = twins("in_the_readme")

    def fail(_: Tensor) -> None:
        raise MemoryError

    parameters = list(mixed.parameters())
    handle = mixed.tok_emb.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    _, loss = losses(plain, mixed, 0)
    with pytest.raises(MemoryError):
        loss.backward()
    handle.remove()
    assert all(one is other for one, other in zip(mixed.parameters(), parameters, strict=True))
    mixed.zero_grad()  # what was reduced before
    for step in (1, 2):
        for loss in losses(plain, mixed, step):
            loss.backward()
        assert_alike(plain, mixed, "gradients", gradient)
        assert "plain" not in kinds(mixed)


@spmd(ranks=2)
def test_a_write_between_forward_and_backward_is_refused_as_in_one_process() -> None:
    for model in twins("in_the_readme"):
        loss = model(batch_of(0)).square().mean()
        with torch.no_grad():
            model.tok_emb.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@spmd(ranks=2)
def test_a_step_between_forward_and_backward_is_refused_as_in_one_process() -> None:
    for model in twins("in_the_readme"):
        optimizer = torch.optim.SGD([model.tok_emb.weight], lr=0.1)
        model(batch_of(0)).square().mean().backward()
        loss = model(batch_of(1)).square().mean()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@spmd(ranks=2)
def test_hooks_of_the_users_are_called_once_with_the_mean() -> None:
    plain, mixed = twins("in_the_readme")
    for model in (plain, mixed):
        model.tok_emb.weight.register_hook(lambda grad: 2 * grad)
    stepped = torch.optim.SGD([mixed.tok_emb.weight], lr=0.1)
    seen: list[Tensor] = []

    def step(parameter: Tensor) -> None:
        assert parameter is mixed.tok_emb.weight or parameter.grad is not None
        seen.append(full(parameter.grad))  # type: ignore[arg-type]
        stepped.step()
        stepped.zero_grad()

    mixed.tok_emb.weight.register_post_accumulate_grad_hook(step)
    for loss in losses(plain, mixed, 0):
        loss.backward()
    before = plain.tok_emb.weight.detach().clone()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], plain.tok_emb.weight.grad)
    torch.testing.assert_close(full(mixed.tok_emb.weight), before - 0.1 * seen[0])


@spmd(ranks=2)
def test_an_optimizer_made_before_an_annotation_came_to_cover_both_is_refused() -> None:
    model = make_model()
    replicate(model.tok_emb)
    early = torch.optim.SGD([model.tok_emb.weight], lr=0.1)
    fully_shard(model)
    model(batch_of(0)).square().mean().backward()
    with pytest.raises(OptimizerError) as caught:
        early.step()
    assert str(caught.value) == (
        "SGD.step: parameter 'weight' of unit 'tok_emb' is what modules compute with. A DTensor stands in its place since one "
        "annotation covers both replicated and sharded modules. Make the optimizer after annotating, and between steps, from "
        "model.parameters(). The step would train nothing; no parameter was changed."
    )


# --- state ------------------------------------------------------------------------------------------------------------


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(batch_of(step)).square().mean().backward()
    optimizer.step()


def _round_trip(folder: str) -> None:
    model = twins("in_the_readme")[1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    _step(model, optimizer, 0)
    names = ("model", "optimizer")
    dcp.save(dict(zip(names, get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        assert torch.equal(whole["tok_emb.weight"], full(model.tok_emb.weight))
    twin = twins("shards_inside_replicated")[1]
    its_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.05)
    _step(twin, its_optimizer, 5)
    found = dict(zip(names, get_state_dict(twin, its_optimizer), strict=True))
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(twin, its_optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    for each in ((model, optimizer), (twin, its_optimizer)):
        _step(*each, 1)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(full(other), full(one))
    zeros = {name: torch.zeros_like(tensor) for name, tensor in make_model().state_dict().items()}
    set_model_state_dict(twin, zeros, options=StateDictOptions(full_state_dict=True))
    assert not any(full(parameter).any() for parameter in twin.parameters())
    x = twin(batch_of(0))
    assert not x.any()


def test_a_checkpoint_of_one_mix_loads_into_another(pool: Pool, device: str, tmp_path: Any) -> None:
    need_devices(device, 2)
    pool.run(2, _round_trip, str(tmp_path / "checkpoint"), device=device)


@pytest.mark.parametrize("mix", MIXES)
@spmd(ranks=2)
def test_copies_moved_and_loaded_models_train_on(mix: str) -> None:
    plain, mixed = twins(mix)
    twin = copy.deepcopy(mixed)
    assert kinds(twin) == kinds(mixed)
    _train(copy.deepcopy(plain), twin, RECIPES["AdamW"])
    assert_alike(plain, mixed, "the original")
    for model in (plain, mixed):
        model.float().double()
    _train(copy.deepcopy(plain), mixed, RECIPES["SGD(foreach=True)"])
    assert "plain" not in kinds(mixed)
    for assign in (False, True):
        twin.load_state_dict(copy.deepcopy(mixed.state_dict()), assign=assign)
        reference = make_model()
        reference.load_state_dict({name: full(tensor) for name, tensor in mixed.state_dict().items()})
        _train(reference, twin, RECIPES["AdamW(fused=True)"])

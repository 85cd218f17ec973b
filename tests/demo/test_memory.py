"""Memory of a step is counted once, by what it is for, also where only autograd holds it."""

from __future__ import annotations

import gc
from pathlib import Path

import matplotlib.image
import torch
from torch import Tensor, nn

from examples.demo.memory import Kind, MemoryTrace, measure_step
from examples.demo.model import build, loss_of, optimizer_of, train_step
from examples.demo.options import Options
from examples.demo.pictures import draw_losses, draw_memory
from examples.demo.train import annotate
from tests.helpers.world import Pool

WIDTH, ROWS = 64, 1024
FLOAT = 4


class Squared(nn.Module):
    """One layer whose square saves its input for backward; no Python object holds that input
    meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def trained() -> tuple[Squared, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = Squared()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(ROWS, WIDTH)
    model(x).backward()
    optimizer.step()
    return model, optimizer, x


def after(trace: MemoryTrace, phase: str) -> tuple[int, ...]:
    """The totals when `phase` was over, which is when the next one began."""
    names = [name for name, _ in trace.phases]
    following = names.index(phase) + 1
    return trace.totals[trace.phases[following][1] if following < len(names) else -1]


def test_parameters_and_optimizer_state_are_counted_to_the_byte() -> None:
    model, optimizer, x = trained()
    trace = measure_step(model, optimizer, lambda: model(x), ignore=[x])
    weights = WIDTH * WIDTH * FLOAT
    assert {total[Kind.PARAMETERS] for total in trace.totals} == {weights}
    assert {total[Kind.OPTIMIZER] for total in trace.totals} == {2 * weights + FLOAT}


def test_gradients_live_from_backward_to_zero_grad() -> None:
    model, optimizer, x = trained()
    trace = measure_step(model, optimizer, lambda: model(x), ignore=[x])
    assert after(trace, "forward")[Kind.GRADIENTS] == 0
    assert after(trace, "backward")[Kind.GRADIENTS] == WIDTH * WIDTH * FLOAT
    assert after(trace, "at rest")[Kind.GRADIENTS] == 0


def test_an_activation_that_only_autograd_holds_is_counted_until_backward_has_used_it() -> None:
    model, optimizer, x = trained()
    trace = measure_step(model, optimizer, lambda: model(x), ignore=[x])
    saved = ROWS * WIDTH * FLOAT
    assert saved <= after(trace, "forward")[Kind.ACTIVATIONS] < saved + 64
    assert after(trace, "backward")[Kind.ACTIVATIONS] < 64
    assert after(trace, "at rest")[Kind.ACTIVATIONS] < 64


def test_ignored_tensors_do_not_show_and_others_that_were_there_before_do() -> None:
    model, optimizer, x = trained()
    without = measure_step(model, optimizer, lambda: model(x), ignore=[x])
    with_data = measure_step(model, optimizer, lambda: model(x))
    assert with_data.totals[0][Kind.MESSAGES] - without.totals[0][Kind.MESSAGES] == x.nbytes


def test_memory_that_comes_and_goes_inside_one_storage_is_followed() -> None:
    model, optimizer, x = trained()
    buffer = torch.zeros(1 << 18)
    buffer.untyped_storage().resize_(0)

    def loss() -> Tensor:
        buffer.untyped_storage().resize_(1 << 20)
        value = model(x)
        buffer.untyped_storage().resize_(0)
        return value

    trace = measure_step(model, optimizer, loss, ignore=[x])
    most = max(total[Kind.MESSAGES] for total in trace.totals)
    assert most - after(trace, "at rest")[Kind.MESSAGES] == 1 << 20


def test_a_measured_step_trains_as_any_other() -> None:
    model, optimizer, x = trained()
    clone, clone_optimizer, _ = trained()
    measure_step(model, optimizer, lambda: model(x), ignore=[x])
    clone_optimizer.zero_grad()
    clone(x).backward()
    clone_optimizer.step()
    assert torch.equal(model.layer.weight, clone.layer.weight)


def test_the_footprint_without_shards_is_the_whole() -> None:
    model, optimizer, x = trained()
    footprint = measure_step(model, optimizer, lambda: model(x), ignore=[x]).footprint
    weights = WIDTH * WIDTH * FLOAT
    expected = {
        "parameters, buffers": weights,
        "optimizer state": 2 * weights + FLOAT,
        "gradients": weights,
    }
    assert footprint == {name: (numel, numel) for name, numel in expected.items()}


def test_both_pictures_are_drawn(tmp_path: Path) -> None:
    model, optimizer, x = trained()
    trace = measure_step(model, optimizer, lambda: model(x), ignore=[x])
    draw_memory(tmp_path / "one.png", [("alone", trace)])
    draw_memory(tmp_path / "two.png", [("left", trace), ("right", trace)])
    draw_losses(
        tmp_path / "checked.png", [5.0, 4.0, 3.0], [(2, 4.1), (3, 3.2)], [5.0, 4.000001], ranks=2
    )
    draw_losses(tmp_path / "plain.png", [5.0, 4.0, 3.0], [], [], ranks=1)
    for name in ("one", "two", "checked", "plain"):
        pixels = matplotlib.image.imread(tmp_path / f"{name}.png")
        assert min(pixels.shape[:2]) > 400
        assert pixels[..., :3].std() > 0.05  # ink on paper


def test_blocks_that_are_kept_without_a_tensor_are_reported() -> None:
    model, optimizer, x = trained()
    before = measure_step(model, optimizer, lambda: model(x), ignore=[x]).idle
    kept = torch.UntypedStorage(1 << 20)
    assert (
        measure_step(model, optimizer, lambda: model(x), ignore=[x]).idle - before == kept.nbytes()
    )


def test_memory_that_two_storages_share_counts_once() -> None:
    model, optimizer, x = trained()
    alias = torch.from_dlpack(model.layer.weight.detach())
    trace = measure_step(model, optimizer, lambda: model(x), ignore=[x])
    assert alias.untyped_storage()._cdata != model.layer.weight.untyped_storage()._cdata
    assert {total[Kind.PARAMETERS] for total in trace.totals} == {WIDTH * WIDTH * FLOAT}
    without = measure_step(model, optimizer, lambda: model(x), ignore=[x, alias])
    assert trace.totals[-1][Kind.MESSAGES] == without.totals[-1][Kind.MESSAGES]


OPTIONS = Options(
    steps=1, ranks=2, out=Path(), seed=0, batch_size=4, context=16, layers=2, width=64,
    learning_rate=1e-3, baseline_steps=0, sample_bytes=0, resume=False, quiet=True,
)  # fmt: skip


def _between_steps(*, annotated: bool) -> int:
    """Bytes that a trained model holds after `zero_grad`, with its optimizer and whatever else is
    kept.
    """
    before = [
        thing
        for thing in gc.get_objects()
        if isinstance(thing, Tensor) and thing.layout is torch.strided
    ]
    model = annotate(build(OPTIONS)) if annotated else build(OPTIONS)
    optimizer = optimizer_of(model)
    idx = torch.zeros(2, OPTIONS.context, dtype=torch.int64)
    train_step(model, optimizer, idx, idx, peak=1e-3, step=0)
    trace = measure_step(model, optimizer, lambda: loss_of(model, idx, idx), ignore=[*before, idx])
    return sum(trace.totals[-1]) + trace.idle


def _on_a_rank() -> tuple[int, int]:
    return _between_steps(annotated=False), _between_steps(annotated=True)


def test_between_steps_a_rank_of_two_holds_at_most_60_percent_of_the_unannotated_model(
    pool: Pool,
) -> None:
    for alone, shared in pool.run(2, _on_a_rank):
        assert shared <= 0.6 * alone

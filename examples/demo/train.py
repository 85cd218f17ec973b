"""One rank of the demo, as a user would write a training script: annotate, train, check, sample,
save, report.
"""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

from composable import (
    checkpoint,
    describe,
    export,
    full_state_dict,
    fully_shard,
    keep_unsharded,
    materialize,
    replicate,
)
from composable.comm.backends import comms_wrapped_by
from examples.demo import snapshot
from examples.demo.memory import MemoryTrace, measure_step
from examples.demo.model import (
    GPT,
    Block,
    build,
    initialise,
    loss_of,
    optimizer_of,
    shapes,
    train_step,
)
from examples.demo.options import DemoError, Options
from examples.demo.pictures import draw_losses, draw_memory
from examples.demo.prediction import MIB, Counting, Measured, prediction_table, table_of
from examples.demo.text import batch, read_corpus

VALIDATE_EVERY: Final = 50
VALIDATION_BATCHES: Final = 4
LINE_EVERY: Final = 20
SAVE_EVERY: Final = 100
PROMPT: Final = "def "
TEMPERATURE: Final = 0.7
TOLERANCE: Final = 1e-4


def annotate(model: GPT) -> GPT:
    """Annotate the modules in place; the training loop is the same as for the un-annotated
    model.
    """
    checkpoint(model, policy={Block})  # drop activations, recompute them in backward
    replicate(model.tok_emb)  # plain data parallel
    # the rest: parameters, gradients and optimizer state sharded
    fully_shard(model, policy={Block})
    return model


def train(options: Options) -> Measured:
    """The whole demo on this rank; the default process group is up. Returns what one step took.

    Raises:
        DemoError: the checkpoint to resume from does not fit this run, or the losses of the
            annotated and the un-annotated model differ.
    """
    run = Run(options)
    corpus = run.corpus
    run.say(
        f"composable demo: {options.ranks} rank{'s' * (options.ranks > 1)},"
        f" {len(corpus.train) / 1e6:.1f} MB of Python source from {corpus.files} files of the"
        " standard library"
    )
    if not options.resume and (step := snapshot.saved_step(options)):
        run.say(
            f"the checkpoint in {options.out} (step {step}) will be replaced; --resume would"
            " continue from it"
        )
    baseline: list[float] = []
    traces: list[tuple[str, MemoryTrace]] = []
    if options.baseline_steps and not options.resume:
        count = min(options.baseline_steps, options.until(0))
        run.say(f"un-annotated model: {count} steps in one process on the whole batch ...")
        if dist.get_rank() == 0:
            baseline, trace = run.baseline(count)
            traces.append(("un-annotated, 1 process:\nthe whole batch", trace))
        box = [baseline]
        dist.broadcast_object_list(box)
        baseline = box[0]
    run.train(baseline)
    if options.sample_bytes:
        run.heading("A sample of what it writes")
        run.details.print(PROMPT + run.generate())
    trace = run.measure()
    run.heading("describe(model)")
    run.details.print(str(describe(run.model)), soft_wrap=True)
    run.heading("Memory of a rank")
    run.details.print(_memory_table(trace, options.ranks))
    if dist.get_rank() == 0:
        part = f"1/{options.ranks} of the batch, recomputed, sharded"
        traces.append((f"annotated, rank 0 of {options.ranks}:\n{part}", trace))
        losses, memory = options.out / "losses.png", options.out / "memory.png"
        draw_losses(losses, run.progress.losses, run.progress.validation, baseline, options.ranks)
        draw_memory(memory, traces)
        run.say(f"\nloss curves        {losses}\nmemory of a step   {memory}")
    return Measured(trace, run.sizes)


def predict(options: Options, measured: Measured) -> None:
    """Print the forecast of a step beside the step. The process group is gone: a forecast makes a
    pretended one.
    """
    console = Console(highlight=False, markup=False)
    console.print()
    console.rule("Forecast of a step", align="left")
    console.print(prediction_table(options, annotate, measured))


class Run:
    """A model in training on one rank. Rank 0 prints; `details` is what `--quiet` leaves out."""

    def __init__(self, options: Options) -> None:
        self.options = options
        rank = dist.get_rank()
        console = partial(Console, highlight=False, markup=False)
        self.say = partial(console(quiet=rank != 0).print, soft_wrap=True)
        self.details = console(quiet=options.quiet or rank != 0)
        self.corpus = read_corpus()
        self.progress = snapshot.Progress()
        self.sizes: list[int] = []  # bytes of collectives

    def heading(self, title: str) -> None:
        self.details.print()
        self.details.rule(title, align="left")

    def baseline(self, count: int) -> tuple[list[float], MemoryTrace]:
        """The losses of `count` steps of the un-annotated model on the whole batch, and the memory
        of one more.
        """
        self.model = build(self.options)
        self.optimizer = optimizer_of(self.model)
        losses = [
            self._step(step, *self._batch(self.corpus.train, step)).item() for step in range(count)
        ]
        return losses, self._measured(*self._batch(self.corpus.train, count))

    def train(self, baseline: list[float]) -> None:
        """Train until the last step, and check the losses of the first ones against those of the
        un-annotated model.
        """
        options = self.options
        with comms_wrapped_by(partial(Counting, sizes=self.sizes)):
            # without memory, until every rank knows its part
            self.model = annotate(shapes(options))
        torch.manual_seed(options.seed)
        materialize(self.model, initialise)
        self.optimizer = optimizer_of(self.model)
        if options.resume:
            self.progress = snapshot.load(options, self.model, self.optimizer)
        progress, start = self.progress, self.progress.step
        until = options.until(start)
        numel = sum(parameter.numel() for parameter in self.model.parameters())
        self.heading(
            f"Training the annotated model, {numel / 1e6:.2f} M parameters, on {options.ranks}"
            " ranks"
        )
        if options.resume:
            self.say(f"resumed from step {start}")
        seconds, validation = 0.0, ""
        quiet = self.details.quiet or not self.details.is_terminal  # else a bar, beside the lines
        steps = track(range(start, until), "", console=self.details, disable=quiet, transient=True)
        for step in steps:
            before = time.perf_counter()
            loss = self._mean(self._step(step, *self._rows(self.corpus.train, step)))
            seconds += time.perf_counter() - before
            if step < len(baseline):
                check_parity(step, loss, baseline[step])
            progress.step = step + 1
            progress.losses.append(loss)
            done = progress.step == until
            if done or progress.step % VALIDATE_EVERY == 0:
                progress.validation.append((progress.step, self.validate()))
                validation = f", validation {progress.validation[-1][1]:.4f}"
            if done or progress.step % LINE_EVERY == 0:
                figures = f"loss {loss:.4f}{validation}"
                per_step = seconds / (progress.step - start)
                tokens = options.batch_size * options.context / per_step
                speed = f"{1e3 * per_step:,.0f} ms per step, {tokens:,.0f} tokens/s"
                line = f"step {progress.step:>5}/{until}  {figures}, {speed}"
                self.details.print(line, soft_wrap=True)
            if done or progress.step % SAVE_EVERY == 0:
                folder = snapshot.save(options, self.model, self.optimizer, progress)
        if baseline:
            most = max(map(relative_difference, progress.losses, baseline))
            self.say(
                f"first {len(baseline)} steps agree with the un-annotated model: relative"
                f" difference at most {most:.1e}"
            )
        self.say(f"step {until}: {figures} nats per byte, {speed}")
        self.say(f"sharded checkpoint {folder}")
        self.export(options.out / f"model-{until:06d}")

    def export(self, folder: Path) -> None:
        """Write the whole model for other programs, and read it back as they would."""
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
        dist.barrier()
        export(self.model, folder)
        whole = full_state_dict(self.model)
        if dist.get_rank() == 0:
            read: dict[str, Tensor] = {}
            for file in folder.glob("*.safetensors"):
                read |= load_file(file)
            if read.keys() != whole.keys() or any(
                not torch.equal(read[name], whole[name]) for name in whole
            ):
                raise DemoError(f"safetensors reads other weights from {folder} than the model has")
        self.say(f"exported model     {folder}, {len(whole)} tensors, as safetensors reads them")

    def validate(self) -> float:
        """Mean loss over a few held-out batches, always the same ones."""
        self.model.eval()
        with torch.no_grad(), keep_unsharded(self.model):
            losses = [
                loss_of(self.model, *self._rows(self.corpus.validation, -1 - i))
                for i in range(VALIDATION_BATCHES)
            ]
        self.model.train()
        return self._mean(torch.stack(losses).mean())

    def generate(self) -> str:
        """Bytes that follow the prompt. All ranks generate the same, in lockstep, so they gather
        together.
        """
        options = self.options
        generator = torch.Generator().manual_seed(options.seed)
        idx = torch.tensor([list(PROMPT.encode())])
        self.model.eval()
        with torch.no_grad(), keep_unsharded(self.model):
            for _ in range(options.sample_bytes):
                logits = self.model(idx[:, -options.context :])[0, -1]
                following = torch.multinomial(
                    (logits / TEMPERATURE).softmax(0), 1, generator=generator
                )
                idx = torch.cat([idx, following[None]], dim=1)
        self.model.train()
        text = bytes(idx[0, -options.sample_bytes :].tolist()).decode("utf-8", errors="replace")
        return "".join(c if c.isprintable() or c == "\n" else "\N{MIDDLE DOT}" for c in text)

    def measure(self) -> MemoryTrace:
        """One more step, after everything that counts, with a record of its memory."""
        self.sizes.clear()
        return self._measured(*self._rows(self.corpus.train, self.progress.step))

    def _step(self, step: int, idx: Tensor, targets: Tensor) -> Tensor:
        peak = self.options.learning_rate
        return train_step(self.model, self.optimizer, idx, targets, peak=peak, step=step)

    def _measured(self, idx: Tensor, targets: Tensor) -> MemoryTrace:
        def loss() -> Tensor:
            return loss_of(self.model, idx, targets)

        return measure_step(self.model, self.optimizer, loss, ignore=self.corpus[:2])

    def _batch(self, data: Tensor, step: int) -> tuple[Tensor, Tensor]:
        options = self.options
        return batch(
            data, step=step, seed=options.seed, size=options.batch_size, context=options.context
        )

    def _rows(self, data: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """This rank's part of the batch."""
        idx, targets = (t.chunk(self.options.ranks) for t in self._batch(data, step))
        return idx[dist.get_rank()], targets[dist.get_rank()]

    def _mean(self, value: Tensor) -> float:
        total = value.double()
        dist.all_reduce(total)
        return total.item() / self.options.ranks


def relative_difference(one: float, other: float) -> float:
    return abs(one - other) / abs(other)


def check_parity(step: int, loss: float, expected: float) -> None:
    """Check the loss of one step against the un-annotated model.

    Raises:
        DemoError: the losses differ by more than 1e-4 of the expected one, or one of them is not a
            number.
    """
    difference = relative_difference(loss, expected)
    if not difference <= TOLERANCE:
        raise DemoError(
            f"step {step + 1}: the annotated model's loss is {loss:.7f}, the un-annotated model's"
            f" {expected:.7f}; they differ by {difference:.1e} of it, and {TOLERANCE:.0e} is"
            " allowed"
        )


def _memory_table(trace: MemoryTrace, ranks: int) -> Table:
    """What one rank holds between steps and at the end of backward, beside the un-annotated
    model.
    """
    rows = {**trace.footprint, "anything else": (trace.kept(), 0)}
    gradients = rows.pop("gradients")
    mine, whole = (sum(column) for column in zip(*rows.values(), strict=True))
    rows["between steps"] = mine, whole
    rows["gradients"] = gradients
    rows["at the end of backward"] = mine + gradients[0], whole + gradients[1]
    table = table_of("MiB", "un-annotated", f"each of {ranks} ranks", "share")
    for name, (mine, whole) in rows.items():
        share = f"{mine / whole:.0%}" if whole else ""
        style = "bold" if name in ("between steps", "at the end of backward") else None
        table.add_row(name, f"{whole / MIB:.2f}", f"{mine / MIB:.2f}", share, style=style)
    return table

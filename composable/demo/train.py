"""One rank of the demo, as a user would write a training script: annotate, train, check, sample, save, report."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import checkpoint, describe, fully_shard, keep_unsharded, replicate
from composable.demo import pictures, snapshot
from composable.demo.baseline import Baseline, check_parity, relative_difference, run_baseline
from composable.demo.launch import cores
from composable.demo.memory import Footprint, MemoryTrace, footprint_of, measure_step, resident_bytes
from composable.demo.model import GPT, Block, build, loss_of
from composable.demo.options import Options
from composable.demo.recipe import optimizer_of, train_step
from composable.demo.screen import Screen
from composable.demo.text import VALIDATION_STEP, Corpus, batch, read_corpus, rows_of

VALIDATE_EVERY = 50
VALIDATION_BATCHES = 4
TEMPERATURE = 0.7


def annotate(model: GPT) -> GPT:
    """Annotate the modules in place; the training loop is the same as for the un-annotated model."""
    checkpoint(model, policy={Block})  # forget activations, recompute them in backward
    replicate(model.tok_emb)  # plain data parallel
    fully_shard(model, policy={Block})  # the rest: parameters, gradients and optimizer state sharded
    return model


def train(options: Options, screen: Screen) -> None:
    """The whole demo on this rank; the default process group is up.

    Raises:
        BadValue: the checkpoint to resume from does not fit this run.
        ParityError: the losses of the annotated and the un-annotated model differ.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    corpus = read_corpus()
    screen.line(
        f"[bold]composable demo[/bold]: {ranks} rank{'s' * (ranks > 1)}, "
        f"{len(corpus.train) / 1e6:.1f} MB of Python source from {corpus.files} files of the standard library"
    )
    if not options.resume and (step := snapshot.saved_step(options)):
        screen.line(f"the checkpoint in {options.out} (step {step}) will be replaced; --resume would continue from it")
    baseline = _baseline(options, screen)
    before = resident_bytes()
    model = annotate(build(options))
    optimizer = optimizer_of(model)
    progress = snapshot.load(options, model, optimizer) if options.resume else snapshot.Progress(0, [], [])
    parameters = sum(p.numel() for p in model.parameters())
    screen.heading(f"Training the annotated model, {parameters / 1e6:.2f} M parameters, on {ranks} ranks")
    if options.resume:
        screen.line(f"resumed from step {progress.step}")

    run = Run(options, screen, corpus, model, optimizer, rank, ranks)
    progress = run.to_the_end(progress, baseline.losses if baseline else [])
    if options.sample_bytes:
        screen.heading("A sample of what it writes")
        screen.sample(options.prompt, run.generate(options.prompt, options.sample_bytes))
    trace, footprint = run.measure(progress.step, before)
    screen.heading("describe(model)")
    screen.text(str(describe(model)))
    screen.heading("Memory of a rank")
    screen.bytes_per_rank(footprint.local, footprint.whole, trace.kept(), ranks)
    if rank == 0:
        _draw(options, screen, progress, baseline, trace, ranks)


class Run:
    """A model in training on one rank."""

    def __init__(
        self,
        options: Options,
        screen: Screen,
        corpus: Corpus,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rank: int,
        ranks: int,
    ) -> None:
        self.options, self.screen, self.corpus = options, screen, corpus
        self.model, self.optimizer = model, optimizer
        self.rank, self.ranks = rank, ranks

    def to_the_end(self, progress: snapshot.Progress, expected: list[float]) -> snapshot.Progress:
        """Train until the last step, checking the losses that are expected of the first ones."""
        options, screen = self.options, self.screen
        losses, validation = list(progress.losses), list(progress.validation)
        until = options.until(progress.step)
        with screen.training(progress.step, until, options.batch_size * options.context) as bar:
            for step in range(progress.step, until):
                loss = self._mean(self._step(step))
                losses.append(loss)
                if step < len(expected):
                    check_parity(step, loss, expected[step])
                done = step + 1
                if done % VALIDATE_EVERY == 0 or done == until:
                    bar.pause()
                    validation.append((done, self.validate()))
                    bar.validated(validation[-1][1])
                    bar.resume()
                bar.step(done, loss)
                if done % options.save_every == 0 or done == until:
                    bar.pause()
                    progress = snapshot.Progress(done, losses, validation)
                    folder = snapshot.save(options, self.model, self.optimizer, progress)
                    bar.resume()
            rate = bar.rate()
        compared = min(len(expected), len(losses))
        if compared:
            differences = [relative_difference(losses[i], expected[i]) for i in range(compared)]
            screen.losses_side_by_side(losses[:compared], expected[:compared], differences)
            screen.line(
                f"first {compared} steps agree with the un-annotated model: relative difference at most {max(differences):.1e}"
            )
        screen.line(
            f"step {until}: loss {losses[-1]:.4f}, validation {validation[-1][1]:.4f} nats per byte, {rate:,.0f} tokens/s"
        )
        screen.written("sharded checkpoint", folder)
        return progress

    def validate(self) -> float:
        """Mean loss over a few held-out batches, always the same ones."""
        self.model.eval()
        with torch.no_grad(), keep_unsharded(self.model):
            losses = [
                loss_of(self.model, *self._rows(self.corpus.validation, VALIDATION_STEP - i)) for i in range(VALIDATION_BATCHES)
            ]
        self.model.train()
        return self._mean(torch.stack(losses).mean())

    def generate(self, prompt: str, count: int) -> str:
        """`count` bytes that follow `prompt`. All ranks generate the same, in lockstep, so they gather together."""
        generator = torch.Generator().manual_seed(self.options.seed)
        start = prompt.encode(errors="surrogateescape")
        idx = torch.frombuffer(bytearray(start), dtype=torch.uint8).long()[None]
        self.model.eval()
        with torch.no_grad(), keep_unsharded(self.model):
            for _ in range(count):
                logits = self.model(idx[:, -self.options.context :])[0, -1]
                following = torch.multinomial((logits / TEMPERATURE).softmax(0), 1, generator=generator)
                idx = torch.cat([idx, following[None]], dim=1)
        self.model.train()
        return bytes(idx[0, len(start) :].tolist()).decode("utf-8", errors="replace")

    def measure(self, step: int, resident_before: int) -> tuple[MemoryTrace, Footprint]:
        """One more step, after everything that counts, with a record of its memory."""
        footprints: list[Footprint] = []
        idx, targets = self._rows(self.corpus.train, step)
        trace = measure_step(
            self.model,
            self.optimizer,
            lambda: loss_of(self.model, idx, targets),
            ignore=[self.corpus.train, self.corpus.validation],
            resident_before=resident_before,
            with_gradients=lambda: footprints.append(footprint_of(self.model, self.optimizer)),
        )
        return trace, footprints[0]

    def _step(self, step: int) -> Tensor:
        idx, targets = self._rows(self.corpus.train, step)
        return train_step(self.model, self.optimizer, idx, targets, peak=self.options.learning_rate, step=step)

    def _rows(self, data: Tensor, step: int) -> tuple[Tensor, Tensor]:
        options = self.options
        idx, targets = batch(data, step=step, seed=options.seed, size=options.batch_size, context=options.context)
        mine = rows_of(self.rank, self.ranks, options.batch_size)
        return idx[mine], targets[mine]

    def _mean(self, value: Tensor) -> float:
        total = value.double()
        dist.all_reduce(total)
        return total.item() / self.ranks


def _baseline(options: Options, screen: Screen) -> Baseline | None:
    """The un-annotated run, made by rank 0 and known to all; None where there is nothing to compare."""
    if not options.baseline_steps or options.resume:
        return None
    screen.line(f"un-annotated model: {options.compared_steps} steps in one process on the whole batch ...")
    return _from_rank_0(lambda: run_baseline(options, cores()))


def _from_rank_0(make: Callable[[], Baseline]) -> Baseline:
    box: list[Baseline | None] = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    made = box[0]
    assert made is not None
    return made


def _draw(
    options: Options,
    screen: Screen,
    progress: snapshot.Progress,
    baseline: Baseline | None,
    trace: MemoryTrace,
    ranks: int,
) -> None:
    losses, memory = options.out / "losses.png", options.out / "memory.png"
    pictures.draw_losses(losses, progress.losses, progress.validation, baseline.losses if baseline else [], ranks)
    traces = [(f"annotated, rank 0 of {ranks}", trace)]
    if baseline:
        traces.insert(0, ("un-annotated, 1 process, whole batch", baseline.memory))
    pictures.draw_memory(memory, traces)
    screen.line("")
    screen.written("loss curves", losses)
    screen.written("memory of a step", memory)

"""Trainers of others: what wraps an annotated model is refused by name, and accelerate and the
Trainer train it as it is.
"""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline as assert_text
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from composable import fully_shard, remove, replicate, together
from tests.helpers.compare import anatomy, averaged_gradients, full_gradients, full_parameters
from tests.helpers.launched import environment
from tests.helpers.refusals import refusal, same_on_all
from tests.helpers.world import Pool, current_device, spmd

_VERBS: Final[dict[str, Callable[[Any], object]]] = {
    "replicate": replicate,
    "fully_shard": lambda model: fully_shard(model, policy={nn.Linear}),
}


class Regression(nn.Module):
    """A model as the Trainer likes it: it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.head(self.body(x).tanh())
        return {"loss": (y - labels).square().mean(), "logits": y}


def _data() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(4, generator=generator), "labels": torch.randn(1, generator=generator)}
        for _ in range(16)
    ]


# --- wrapped ------------------------------------------------------------------------------------


def _wrapped(verb: str) -> str:
    model = Regression()
    before = anatomy(model)
    _VERBS[verb](model)
    said = refusal(lambda: DistributedDataParallel(model))
    remove(model, verb)
    assert anatomy(model) == before
    DistributedDataParallel(model)
    return said


def _wrapped_from_above() -> str:
    model = Regression()
    replicate(model.body)
    wrapped = DistributedDataParallel(model)
    batch = torch.utils.data.default_collate(_data()[:2])
    return refusal(lambda: wrapped(**batch))


def _wrapped_before(verb: str, below: bool) -> str:
    wrapped = DistributedDataParallel(Regression())
    model = nn.Sequential(wrapped) if below else wrapped
    before = anatomy(model)
    said = refusal(lambda: _VERBS[verb](model))
    assert anatomy(model) == before
    _VERBS[verb](nn.Sequential(Regression()) if below else Regression())
    return said


@pytest.mark.parametrize(("below", "what"), [(False, "the module"), (True, "'0'")])
@pytest.mark.parametrize("verb", _VERBS)
def test_a_model_that_was_wrapped_before_is_refused_with_what_to_annotate(
    pool: Pool, verb: str, below: bool, what: str
) -> None:
    assert (
        same_on_all(pool.run(2, _wrapped_before, verb, below))
        == f"ClashError: {verb}: {what} is a DistributedDataParallel already, and gradients would"
        " be averaged twice. Do not wrap: annotate the Regression in its place"
    )


_WRAPPED: Final = {
    verb: f"ClashError: DistributedDataParallel around this Regression: {verb} averages its"
    " gradients already, and they would be averaged twice. Do not wrap it: train the module as it"
    f" is. {how}"
    for verb, how in {
        "replicate": "With accelerate, prepare it by accelerator.prepare_model(model,"
        " evaluation_mode=True), which does not wrap",
        "fully_shard": "accelerate, and the Trainer of transformers, take it as it is, and save it,"
        " if they are asked for FSDP2 after composable.fsdp2.install()",
    }.items()
}


@pytest.mark.parametrize("verb", _VERBS)
def test_a_wrapper_that_would_average_a_second_time_is_refused(pool: Pool, verb: str) -> None:
    assert same_on_all(pool.run(2, _wrapped, verb)) == _WRAPPED[verb]


def test_a_wrapper_around_a_replicated_part_is_refused_when_that_is_called(pool: Pool) -> None:
    assert_text(
        same_on_all(pool.run(2, _wrapped_from_above)),
        """AnnotationError: unit '(root)' is called inside DistributedDataParallel, which would average gradients once more. Leave DDP out: replicate and fully_shard average gradients themselves""",
    )


@spmd(ranks=2)
def test_a_wrapper_that_was_asked_to_ignore_a_replicated_part_trains_the_rest() -> None:
    plain, ours = Regression(), Regression()
    replicate(ours.body)
    names = [f"body.{name}" for name, _ in ours.body.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ours, names)
    wrapped = DistributedDataParallel(ours)
    rank = dist.get_rank()
    batch = torch.utils.data.default_collate(_data()[4 * rank : 4 * rank + 4])
    for model in (plain, wrapped):
        model(**batch)["loss"].backward()
    expected = averaged_gradients(plain)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


# --- torch's own verbs --------------------------------------------------------------------------


_TORCHS: Final = ("replicate", "newer replicate", "fully_shard", "FullyShardedDataParallel")


def _torchs(kind: str) -> Callable[[nn.Module], nn.Module]:
    from torch.distributed import _composable, fsdp  # noqa: PLC0415, slow
    from torch.distributed._composable import replicate_with_fsdp  # noqa: PLC0415

    return {
        "replicate": _composable.replicate,
        "newer replicate": replicate_with_fsdp.replicate,
        "fully_shard": fsdp.fully_shard,
        "FullyShardedDataParallel": partial(
            fsdp.FullyShardedDataParallel, device_id=current_device(), use_orig_params=True
        ),
    }[kind]


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def _refused_next_to_torchs(verb: str) -> list[list[str]]:
    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        for kind in _TORCHS:
            on, below = _torchs(kind)(_layers()), nn.Sequential(_torchs(kind)(_layers()))
            said.append([])
            # torch's fully_shard leaves what its replicate manages alone, and so does ours
            left_alone = verb == "fully_shard" and kind.endswith("replicate")
            for model in (on,) if left_alone else (on, below):
                before = anatomy(model)
                said[-1].append(refusal(lambda m=model: _VERBS[verb](m)))
                assert anatomy(model) == before
    return said


@pytest.mark.parametrize("verb", list(_VERBS))
def test_what_verbs_of_torch_manage_is_refused(pool: Pool, verb: str) -> None:
    outcomes = pool.run(2, _refused_next_to_torchs, verb)
    assert outcomes[0] == outcomes[1]
    for kind, said in zip(_TORCHS, outcomes[0], strict=True):
        name = kind.removeprefix("newer ")
        tail = (
            f"is managed by torch's {name} already, and gradients would be averaged twice. Leave"
            " one of the two out"
        )
        expected = [f"ClashError: {verb}: {what} {tail}" for what in ("the module", "'0'")]
        assert said == expected[: len(said)]


@pytest.mark.parametrize("kind", ["replicate", "newer replicate"])
@spmd(ranks=2)
def test_shards_around_torchs_replicate_train_as_one_process(kind: str) -> None:
    plain, ours = _layers(), _layers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        _torchs(kind)(ours[0])
        fully_shard(ours, policy={nn.Linear})
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, foreach=False)
        alone = torch.optim.SGD(plain.parameters(), lr=0.1)
        for number in range(3):
            x = torch.full((2, 4), float(dist.get_rank() + number))
            for model in (plain, ours):
                model(x).square().sum().backward()
            averaged = averaged_gradients(plain)
            torch.testing.assert_close(full_gradients(ours), averaged)
            for name, parameter in plain.named_parameters():
                parameter.grad = averaged[name]
            for each in (alone, optimizer):
                each.step()
                each.zero_grad()
    torch.testing.assert_close(full_parameters(ours), full_parameters(plain))


@pytest.mark.parametrize("verb", list(_VERBS))
@spmd(ranks=2)
def test_a_verb_of_torch_on_an_annotated_module_is_refused(verb: str) -> None:
    model = _layers()
    _VERBS[verb](model)
    before = full_parameters(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        for kind in ("replicate", "newer replicate", "fully_shard"):
            with pytest.raises(AssertionError, match="has already been applied"):
                _torchs(kind)(model)
    assert type(model) is nn.Sequential
    after = full_parameters(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("verb", list(_VERBS))
@pytest.mark.parametrize("kind", ["replicate", "newer replicate", "fully_shard"])
@spmd(ranks=2)
def test_verbs_of_torch_leave_annotated_parts_to_their_verb(kind: str, verb: str) -> None:
    plain, model = Regression(), Regression()
    _VERBS[verb](model.body)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        _torchs(kind)(model)
        rank = dist.get_rank()
        batch = torch.utils.data.default_collate(_data()[4 * rank : 4 * rank + 4])
        for each in (plain, model):
            each(**batch)["loss"].backward()
    expected = averaged_gradients(plain)
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, expected[name])


# --- trained ------------------------------------------------------------------------------------


@contextmanager
def _launched() -> Iterator[None]:
    """What a launcher says in the environment, and accelerate's own state, for this run only."""
    from accelerate.state import AcceleratorState, GradientState  # noqa: PLC0415, slow, and it warns

    with (
        mock.patch.dict(os.environ, environment(1, ACCELERATE_USE_CPU="true")),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # theirs
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def _in_one_process(lost: Sequence[int] = ()) -> dict[str, Tensor]:
    """Both ranks' batches together, clipped, as the trainers do below; without some steps."""
    model, data = Regression(), _data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in (start for start in range(0, 16, 4) if start // 4 not in lost):
        model(**torch.utils.data.default_collate(data[start : start + 4]))["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


def _assert_trained(model: nn.Module, lost: Sequence[int] = ()) -> None:
    expected = _in_one_process(lost)
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, expected[name], msg=lambda text, n=name: f"{n}: {text}")


def _with_accelerate(verb: str) -> None:
    from accelerate import Accelerator  # noqa: PLC0415, slow, and it warns

    with _launched():
        accelerator = Accelerator(cpu=True)
        model = Regression()
        _VERBS[verb](model)
        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(_data(), batch_size=2)  # type: ignore[arg-type]
        optimizer, loader = accelerator.prepare(optimizer, loader)
        for batch in loader:
            accelerator.backward(model(**batch)["loss"])
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert type(model) is Regression
        _assert_trained(model)


@pytest.mark.beyond_sim("it knows no such device, and trains on the host")
@pytest.mark.parametrize("verb", _VERBS)
def test_accelerate_trains_an_annotated_model(pool: Pool, verb: str) -> None:
    pytest.importorskip("accelerate")
    pool.run(2, _with_accelerate, verb)


def _fail_in_step(model: Regression, step: int) -> None:
    """One rank runs out of memory there."""
    steps = itertools.count()

    def fail(*_: object) -> None:
        if next(steps) == step and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("as planned")

    model.head.register_forward_pre_hook(fail)


def _with_the_trainer(verb: str, folder: str, lost: Sequence[int] = ()) -> None:
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415, slow, and it warns

    class Patient(Trainer):  # as docs/guides/lost_steps.md has it
        def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> Tensor:
            with together(model) as step:
                loss: Tensor = super().training_step(model, inputs, *args)
            if step.lost:
                said.append(step.why)
                model.zero_grad()
                return torch.zeros((), device=self.args.device)
            return loss

    said: list[str] = []
    with _launched():
        model = Regression()
        _VERBS[verb](model)
        for step in lost:
            _fail_in_step(model, step)
        trainer = (Patient if lost else Trainer)(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                num_train_epochs=1,
                per_device_train_batch_size=2,
                train_sampling_strategy="sequential",
                lr_scheduler_type="constant",
                max_grad_norm=0.5,
            ),
            train_dataset=_data(),  # type: ignore[arg-type]
            optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        )
        trainer.accelerator.prepare_model = partial(
            trainer.accelerator.prepare_model, evaluation_mode=True
        )  # type: ignore[method-assign]
        trainer.train()
        assert trainer.model_wrapped is model
        _assert_trained(model, lost)
    unit = "(root)" if verb == "replicate" else "head"
    why = f"rank 1: OutOfMemoryError in the forward of unit '{unit}': as planned"
    assert said == [why] * len(lost)


@pytest.mark.beyond_sim("it knows no such device, and trains on the host")
@pytest.mark.parametrize("verb", _VERBS)
def test_the_trainer_loses_a_step_on_all_ranks_that_one_rank_loses(
    pool: Pool, verb: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    pool.run(2, _with_the_trainer, verb, str(tmp_path), [2])


@pytest.mark.beyond_sim("it knows no such device, and trains on the host")
@pytest.mark.parametrize("verb", _VERBS)
def test_the_trainer_of_transformers_trains_an_annotated_model(
    pool: Pool, verb: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    pool.run(2, _with_the_trainer, verb, str(tmp_path))


def _wrapped_by_the_trainer(folder: str) -> str:
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415, slow, and it warns

    with _launched():
        model = Regression()
        replicate(model)
        args = TrainingArguments(output_dir=folder, use_cpu=True, report_to=[], disable_tqdm=True)
        trainer = Trainer(model=model, args=args, train_dataset=_data())  # type: ignore[arg-type]
        return refusal(trainer.train)


def test_the_trainer_that_would_wrap_is_refused_with_the_way_to_stop_it(
    pool: Pool, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    assert same_on_all(pool.run(2, _wrapped_by_the_trainer, str(tmp_path))) == _WRAPPED["replicate"]

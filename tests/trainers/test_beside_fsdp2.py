"""Trainers of others, unchanged, run over composable by the runner and over torch's FSDP2: with the
same numbers, no more reductions, and exact resumption.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import pytest

from tests.helpers.launched import launched
from tests.helpers.world import Pool
from tests.trainers.programs.__main__ import BY_HAND, GUIDE, NEEDS, OPTIONS, PROGRAMS

_ALL: Final = {**PROGRAMS, **OPTIONS, **GUIDE, **BY_HAND}
_MODULE: Final = "tests.trainers.programs"
# of float32; bf16 rounds before the sum
_ROUNDING: Final = 1e-5

Outcome = tuple[dict[str, list[Any]], list[int], str]  # numbers, reductions per step, traceback
Outcomes = Callable[[str, str], Outcome]


def _missing(name: str) -> list[str]:
    return [needed for needed in NEEDS[_ALL[name][0]] if find_spec(needed) is None]


@pytest.fixture(scope="module")
def outcomes(
    pool: Pool, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    """What programs noted over "FSDP2" or "composable". All that this session asks for run in one
    launch over each.
    """
    asked = [item.callspec.params["name"] for item in request.session.items
             if request.node.nodeid == item.nodeid.partition("::")[0]]  # fmt: skip
    names = [name for name in _ALL if name in asked and not _missing(name)]

    @cache
    def over(backend: str) -> dict[str, Outcome]:
        over_fsdp2 = backend == "FSDP2"
        command = (_MODULE,) if over_fsdp2 else ("composable.fsdp2", "--cpu", "-m", _MODULE)
        run = [name for name in names if not (over_fsdp2 and name in (*GUIDE, *BY_HAND))]
        folder = tmp_path_factory.mktemp(backend)
        printed = launched(pool, 2, *command, str(folder), *run)
        (line,) = [line for line in printed.splitlines() if line.startswith(f"{backend} {{")]
        found: dict[str, Outcome] = json.loads(line.removeprefix(backend))
        return found

    return lambda backend, name: over(backend)[name]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _assert_near(name: str, ours: Any, theirs: Any) -> None:
    for one, other in zip(_flat(ours), _flat(theirs), strict=True):
        # texts are digests of bits, which the last one of a float changes
        if not isinstance(one, str):
            assert one == pytest.approx(other, rel=_ROUNDING, abs=_ROUNDING), name


def _assert_exact(backend: str, numbers: dict[str, list[Any]]) -> None:
    """What was loaded is what was saved, bit by bit."""
    for saved, loaded in [
        ("trained on", "resumed"), ("trained on", "loaded"), ("trained", "loaded"),
    ]:  # fmt: skip
        if saved in numbers and loaded in numbers:
            assert numbers[loaded] == numbers[saved], f"{loaded} over {backend}"


def _skip_without(name: str) -> None:
    if missing := _missing(name):
        pytest.skip(f"{', '.join(missing)} is not installed; pip install -e '.[test]'")


def _compare(name: str, outcomes: Outcomes) -> None:
    _skip_without(name)
    theirs, reductions, failed = outcomes("FSDP2", name)
    assert not failed, f"over FSDP2:\n{failed}"
    numbers, own_reductions, failed = outcomes("composable", name)
    assert not failed, f"over composable:\n{failed}"
    assert list(numbers) == list(theirs)
    for what, expected in theirs.items():
        _assert_near(what, numbers[what], expected)
    _assert_exact("FSDP2", theirs)
    _assert_exact("composable", numbers)
    assert max(own_reductions) > 0
    assert len(own_reductions) == len(reductions)
    assert all(own <= other for own, other in zip(own_reductions, reductions, strict=True))


@pytest.mark.unsampled
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trainer_gives_the_numbers_of_fsdp2(name: str, outcomes: Outcomes) -> None:
    _compare(name, outcomes)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_trainer_with_other_options_gives_the_numbers_of_fsdp2(
    name: str, outcomes: Outcomes
) -> None:
    _compare(name, outcomes)


@pytest.mark.unsampled
@pytest.mark.parametrize("name", BY_HAND)
def test_a_model_annotated_by_hand_is_evaluated_saved_and_resumed(
    name: str, outcomes: Outcomes
) -> None:
    _skip_without(name)
    numbers, _, failed = outcomes("composable", name)
    assert not failed, failed
    assert list(numbers) == ["trained on", "eval_loss", "loaded", "resumed"]
    _assert_exact("composable", numbers)
    assert 3.0 < numbers["eval_loss"][0] < 4.3  # that of chance is 4.16


@pytest.mark.parametrize("name", GUIDE)
def test_the_programs_of_the_guide_run(name: str, outcomes: Outcomes) -> None:
    _skip_without(name)
    numbers, _, failed = outcomes("composable", name)
    assert not failed, failed
    (files,) = numbers["files"]
    assert {"state", "weights", "trained", "final", "adapter", "t5", "by-hand"} <= set(files)
    may_miss = ("trl", "lightning_fabric", "pytorch_lightning")
    missing = {package for package in may_miss if find_spec(package) is None}
    assert {*_flat(numbers["missing"])} == missing

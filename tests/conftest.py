"""Fixtures of all tests: the pool of ranks, and the devices that tests run on."""

from __future__ import annotations

import gc
import os
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Final
from zlib import crc32

import pytest

from tests.accelerator.build import build, what_is_missing
from tests.helpers.world import Pool
from tests.slow import slow

pytest.register_assert_rewrite("tests.helpers.compare")

ACCELERATOR: Final = Path(__file__).parent / "accelerator"  # whose tests run on nothing else

FEW: Final = 1  # cases of one test that `--sample` runs at least


def pytest_addoption(parser: pytest.Parser) -> None:
    devices = (
        "what tests run on; sim: a simulated accelerator; cuda: tests that name their device, with"
        " -k cuda"
    )
    parser.addoption("--device", choices=("cpu", "sim", "cuda"), default="cpu", help=devices)
    sample = "of tests with many cases, run a ninth of the cases: the same ones in every run"
    parser.addoption("--sample", action="store_true", help=sample)
    part = "quick: without the tests of tests/slow.txt; slow: these alone"
    parser.addoption("--part", choices=("quick", "slow"), help=part)


def pytest_configure(config: pytest.Config) -> None:
    """Hide CUDA devices, also from workers: where torch sees one, tensors of the host are not all
    it uses.
    """
    if config.getoption("--device") != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Do not look for garbage while modules are imported, nor among them later: there is none in
    half a million objects, and tests that collect garbage would look through all of them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def is_simulated(config: pytest.Config) -> bool:
    return bool(config.getoption("--device") == "sim")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path == ACCELERATOR and not is_simulated(config) else None


def sample(items: list[pytest.Item]) -> set[pytest.Item]:
    """What `--sample` leaves out. Most tests with many cases multiply numbers of ranks, verbs and
    options; any ninth of a large table meets each value of each of them. Of tests marked
    `in_full_only` all is left out, of those marked `sampled(n)` all but one in `n`.
    """
    cases = defaultdict(list)
    left_out: set[pytest.Item] = set()
    for item in items:
        if item.get_closest_marker("in_full_only") is not None:
            left_out.add(item)
        elif item.get_closest_marker("unsampled") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for each in cases.values():
        if len(each) > FEW:
            # by a number that does not depend on the process, and mixes the table's rows
            each.sort(key=lambda item: crc32(item.nodeid.encode()))
            marked = each[0].get_closest_marker("sampled")
            left_out.update(each[max(FEW, len(each) // (marked.args[0] if marked else 9)) :])
    return left_out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--sample"):
        left_out = sample(items)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    if (part := config.getoption("--part")) is not None:
        is_slow = [item.nodeid.partition("[")[0] in slow() for item in items]
        wanted = [slowly == (part == "slow") for slowly in is_slow]
        config.hook.pytest_deselected(items=[*compress(items, map(not_, wanted))])
        items[:] = compress(items, wanted)
    missing = what_is_missing() if is_simulated(config) else ""
    for item in items:
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))
        elif (beyond := item.get_closest_marker("beyond_sim")) is not None and is_simulated(config):
            item.add_marker(pytest.mark.skip(reason=beyond.args[0]))
        elif item.get_closest_marker("sparse") is not None and is_simulated(config):
            item.add_marker(
                pytest.mark.skip(reason="the simulated accelerator has no sparse tensors")
            )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", [metafunc.config.getoption("--device")])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Ranks launch the same collectives in the same order, but for tests that say why they do
    not. The summary counts these.
    """
    Pool.compares = item.get_closest_marker("launches_not_compared") is None
    if not Pool.compares:
        item.user_properties.append(("tests whose launches were not compared", 1))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what tests that passed have counted, by `record_property`, in sum."""
    counted: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        counted.update(dict(report.user_properties))
    for what, number in counted.items():
        terminalreporter.write_line(f"{number} {what}")
    if terminalreporter.config.getoption("--part") == "quick":
        terminalreporter.write_line(
            f"left to make test-ci: {len(slow())} tests that take long (tests/slow.txt)"
        )


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[Pool]:
    """Workers that live as long as the session, under the session's warning filters."""
    simulated = is_simulated(pytestconfig)
    extension = (
        build(pytestconfig.rootpath / ".pytest_cache/simulated-accelerator") if simulated else None
    )
    ranks = Pool(pytestconfig.getini("filterwarnings"), "sim" if simulated else "cpu", extension)
    yield ranks
    ranks.stop()

"""Fixtures of all tests: the pool of ranks, the devices and the transport that tests run on; knows no test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.helpers import host
from tests.helpers.world import Pool

pytest.register_assert_rewrite("tests.helpers.compare", "tests.helpers.models")

if host.is_left_out():
    collect_ignore = ["device/host"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not host.is_used():
        for item in items:
            if item.get_closest_marker("host") is not None:
                item.add_marker(pytest.mark.skip(reason="ranks of one host use sockets here"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[Pool]:
    """Workers that live as long as the session, under the session's warning filters."""
    ranks = Pool(pytestconfig.getini("filterwarnings"))
    yield ranks
    ranks.stop()

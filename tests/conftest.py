"""Fixtures of all tests: the pool of ranks, and the devices that tests run on; knows no test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.helpers.world import Pool

pytest.register_assert_rewrite("tests.helpers.compare", "tests.helpers.models")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[Pool]:
    """Workers that live as long as the session, under the session's warning filters."""
    ranks = Pool(pytestconfig.getini("filterwarnings"))
    yield ranks
    ranks.stop()

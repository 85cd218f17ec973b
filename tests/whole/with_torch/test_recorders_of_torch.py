"""What torch's recorders keep of a step, as the guide has it: collectives by group, and memory by
who allocated it.

gloo's groups are recorded as NCCL's are, but for the table of groups; memory of a host is not. So
collectives here are gloo's, launched as an accelerator's are, and memory is watched where an
accelerator would be asked for it.
"""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d

from composable import fully_shard, replicate
from composable.comm.backends import AcceleratorComm, comms_wrapped_by
from composable.comm.base import Comm
from composable.memory.streams import Streams
from tests.helpers.world import Pool

pytestmark = pytest.mark.beyond_sim("its groups are not recorded")


# --- collectives --------------------------------------------------------------------------------


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.replicated, self.one, self.two = nn.Linear(2, 4), Layer(4, 8), Layer(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(self.replicated(x))
        y: Tensor = self.two(x)
        return y


def _launched_by_the_caller(comm: Comm) -> Comm:
    return (
        AcceleratorComm(comm.group, torch.device("cpu"), Streams())
        if comm.group is not None
        else comm
    )


def _recorded(after: int) -> dict[str, Any]:
    """What NCCL's watchdog writes to a file before it ends the process; of records those with
    larger numbers.

    gloo leaves out which groups there are. Groups and records have the numbers that ranks of a
    launched program give them: those of the pool have made different ones before.
    """
    found: dict[str, Any] = pickle.loads(c10d._dump_fr_trace(True, True, False))  # type: ignore[attr-defined]
    found["entries"] = [record for record in found["entries"] if record["record_id"] > after]
    everybody = str(list(range(dist.get_world_size())))
    groups = dict(record["process_group"] for record in found["entries"])
    numbers = {name: number for number, name in enumerate(groups)}
    for record in found["entries"]:
        record["pg_id"] = numbers[record["process_group"][0]]
        record["record_id"] -= after + 1
    found["pg_config"] = {
        name: {"name": name, "desc": desc, "ranks": everybody} for name, desc in groups.items()
    }
    return found


def _last() -> int:
    """The number of the last record."""
    return max((record["record_id"] for record in _recorded(-1)["entries"]), default=-1)


def _two_steps(folder: str) -> list[dict[str, Any]]:
    """The records of the second of two steps. Rank 1 dumps before, as if it had never come to
    it.
    """
    start, rank = _last(), dist.get_rank()
    torch.manual_seed(0)
    model = Model()
    # Which has numbered no collectives yet; those of the pool's ranks may differ by what they did
    # before.
    group = dist.new_group(group_desc=_GROUP)
    with comms_wrapped_by(_launched_by_the_caller):
        replicate(model.replicated, mesh=group)
        fully_shard(model, policy={Layer}, mesh=group)
    x = torch.ones(3, 2)
    model(x).sum().backward()
    early, first = _recorded(start), _last()
    model(x).sum().backward()
    Path(folder, f"rank_{rank}").write_bytes(pickle.dumps(early if rank else _recorded(start)))
    records: list[dict[str, Any]] = _recorded(first)["entries"]
    return records


_GROUP: Final = "the group of the test"


@pytest.fixture
def records(pool: Pool, tmp_path: Path) -> list[list[dict[str, Any]]]:
    found: list[list[dict[str, Any]]] = pool.run(2, _two_steps, str(tmp_path))
    if not any(found):
        pytest.skip("this torch does not record gloo's collectives")
    return found


# a half of 40 and of 144 parameters; in backward the first once more
_GATHERS: Final = [[20], [72], [20]]
# Halves of 144 and of 40 parameters, and the 12 of the replicated module. Beside them at least a
# flag for each parameter.
_SUMS: Final = [2 * (72 + 2), 2 * (20 + 2), 12 + 2]


def test_records_tell_what_a_collective_is_for_by_its_group_and_its_unit_by_its_size(
    records: list[list[dict[str, Any]]],
) -> None:
    for of_rank in records:
        sizes: dict[str, list[list[int]]] = {}
        for record in of_rank:
            if record["input_dtypes"] == ["Float"]:  # no checks
                sizes.setdefault(record["process_group"][1], []).extend(record["input_sizes"])
        assert list(sizes) == [_GROUP], "the mesh's own, as the program has named it"
        assert sizes[_GROUP][:3] == _GATHERS
        for (size,), least in zip(sizes[_GROUP][3:], _SUMS, strict=True):
            assert least <= size <= least + 64


def test_the_stack_of_a_record_leads_to_the_line_of_the_model_that_called_the_unit(
    records: list[list[dict[str, Any]]],
) -> None:
    """Or to the line that called backward."""
    for of_rank in records:
        callers = []
        for record in of_rank:
            if record["input_dtypes"] == ["Float"]:
                mine = [
                    frame["name"] for frame in record["frames"] if frame["filename"] == __file__
                ]
                callers.append((record["input_sizes"][0], mine))
        assert callers[0] == ([20], ["_two_steps"]), "the root gathers it before its forward"
        assert callers[1] == ([72], ["forward", "_two_steps"]), "while the unit before computes"
        assert [mine for _, mine in callers[2:]] == [["_two_steps"]] * 4


def test_torchs_analysis_finds_where_a_rank_has_not_come_and_shows_size_and_stack(
    records: list[list[dict[str, Any]]], tmp_path: Path
) -> None:
    (command,) = entry_points(group="console_scripts", name="torchfrtrace")
    program = (
        f"import sys; from {command.module} import {command.attr}; {command.attr}(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    found = done.stdout + done.stderr
    if "gloo != 'nccl'" in found:
        pytest.skip("this torch's analysis knows nothing of gloo")
    assert done.returncode == 0, found
    first = found[found.index("Not all ranks joining collective") :]
    assert _GROUP in first.splitlines()[2], first
    assert "missing ranks: {1}\ninput sizes: [[20]]" in first
    assert "param_group.py" in first


# --- memory -------------------------------------------------------------------------------------


def test_the_guide_names_what_there_is_in_torch_and_in_the_library() -> None:
    root = Path(__file__).resolve().parents[3]
    guide = (root / "docs/guides/debugging.md").read_text()
    assert "`memory/elastic.py`" in guide
    assert (root / "composable/memory/elastic.py").exists()
    for command in re.findall(r"torch\.cuda\.memory\.(\w+)\(", guide):
        assert hasattr(torch.cuda.memory, command)

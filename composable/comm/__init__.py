"""All collectives of the engine. Comms take tensors and a `Launch`, which says what the collective
is for. `MeshInfo` holds the comms of a unit.

Two kinds of collectives are not here. `DTensor` gathers whole parameters for users, and
redistributes gradients of tensor-parallel parameters. Graphs of compiled autograd have their own
all-reduces (features/traced.py).

| tensors on           | backend                         | class              |
|----------------------|---------------------------------|--------------------|
| any device, one rank | none                            | `LocalComm`        |
| a host               | gloo, up to `PAIRS_UP_TO` ranks | `PointToPointComm` |
| a host               | any other                       | `GenericComm`      |
| an accelerator       | NCCL and others                 | `AcceleratorComm`  |

| class              | algorithm                                                    |
|--------------------|--------------------------------------------------------------|
| `LocalComm`        | copies                                                       |
| `PointToPointComm` | a message per pair of ranks, straight into its place         |
| `GenericComm`      | the group's own tensor collectives, asynchronous             |
| `AcceleratorComm`  | the group's own, many in one launch, on streams of their own |
| `SuppliedComm`     | those of another comm, in one message and in supplied memory |
"""

from composable.comm.accelerator import AcceleratorComm
from composable.comm.base import Comm, Traits, Work, backend_of, observe_launches
from composable.comm.choose import (
    comm_of,
    comms_wrapped_by,
    group_of_all,
    is_distributed,
    notification_sum,
    ranks_of,
    reduce_numbers,
    subgroup_of,
    world_group,
)
from composable.comm.host import GenericComm, PointToPointComm
from composable.comm.launch import Launch, LaunchKind
from composable.comm.ledger import Ledger, debug_enabled, ledger_of
from composable.comm.local import LocalComm
from composable.comm.mesh_info import MeshInfo, mesh_info_of_replicas, mesh_info_of_shards
from composable.comm.supplied import SuppliedComm, with_symmetric_memory

__all__ = [
    "AcceleratorComm",
    "Comm",
    "GenericComm",
    "Launch",
    "LaunchKind",
    "Ledger",
    "LocalComm",
    "MeshInfo",
    "PointToPointComm",
    "SuppliedComm",
    "Traits",
    "Work",
    "backend_of",
    "comm_of",
    "comms_wrapped_by",
    "debug_enabled",
    "group_of_all",
    "is_distributed",
    "ledger_of",
    "mesh_info_of_replicas",
    "mesh_info_of_shards",
    "notification_sum",
    "observe_launches",
    "ranks_of",
    "reduce_numbers",
    "subgroup_of",
    "with_symmetric_memory",
    "world_group",
]

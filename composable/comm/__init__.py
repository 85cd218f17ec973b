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

from composable.comm.backends import AcceleratorComm as AcceleratorComm
from composable.comm.backends import GenericComm as GenericComm
from composable.comm.backends import LocalComm as LocalComm
from composable.comm.backends import PointToPointComm as PointToPointComm
from composable.comm.backends import comm_of as comm_of
from composable.comm.backends import comms_wrapped_by as comms_wrapped_by
from composable.comm.backends import group_of_all as group_of_all
from composable.comm.backends import is_distributed as is_distributed
from composable.comm.backends import notification_sum as notification_sum
from composable.comm.backends import ranks_of as ranks_of
from composable.comm.backends import reduce_numbers as reduce_numbers
from composable.comm.backends import subgroup_of as subgroup_of
from composable.comm.backends import world_group as world_group
from composable.comm.base import Comm as Comm
from composable.comm.base import Traits as Traits
from composable.comm.base import Work as Work
from composable.comm.base import backend_of as backend_of
from composable.comm.base import observe_launches as observe_launches
from composable.comm.launch import Launch as Launch
from composable.comm.launch import LaunchKind as LaunchKind
from composable.comm.ledger import Ledger as Ledger
from composable.comm.ledger import debug_enabled as debug_enabled
from composable.comm.ledger import ledger_of as ledger_of
from composable.comm.mesh_info import MeshInfo as MeshInfo
from composable.comm.mesh_info import mesh_info_of_replicas as mesh_info_of_replicas
from composable.comm.mesh_info import mesh_info_of_shards as mesh_info_of_shards
from composable.comm.supplied import SuppliedComm as SuppliedComm
from composable.comm.supplied import with_symmetric_memory as with_symmetric_memory

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

from composable.comm.backends import comms_wrapped_by as comms_wrapped_by
from composable.comm.base import observe_launches as observe_launches

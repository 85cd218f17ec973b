"""The only rooms that call torch.distributed's collectives: one algorithm per backend. Know flat tensors, not modules.

Note [Algorithms per backend]
gloo, all ranks on one host: each rank copies what another needs into memory that both see; pipes tell where (`host/`).
gloo, several hosts: point-to-point pairs, straight from the shard into its final place; in large groups gloo's own collectives.
NCCL and other accelerator backends: tensor collectives on a stream of their own, many of them in one launch.
Anything else: plain tensor collectives, asynchronous where the backend is.
"""

from composable.device.collectives.accelerator import AcceleratorCommunicator
from composable.device.collectives.base import backwards_of
from composable.device.collectives.choice import PAIRS_UP_TO, communicator_of, communicators_wrapped_by, release_messages
from composable.device.collectives.communicator import (
    ON_ACCELERATOR,
    Capabilities,
    Communicator,
    GatherPart,
    ReducePart,
    ScaledInput,
    Scratch,
    Work,
)
from composable.device.collectives.generic import GenericCommunicator
from composable.device.collectives.hook_groups import HookGroup, hook_group_of
from composable.device.collectives.local import LocalCommunicator
from composable.device.collectives.point_to_point import PointToPointCommunicator
from composable.device.collectives.process_groups import (
    backend_of,
    communicator_like,
    group_of_both,
    is_distributed,
    let_go_when_destroyed,
    reference_to,
    subgroup_of,
    world_group,
)
from composable.device.collectives.scalars import reduce_numbers
from composable.device.collectives.tags import Steps, TagSequence

__all__ = [
    "ON_ACCELERATOR",
    "PAIRS_UP_TO",
    "AcceleratorCommunicator",
    "Capabilities",
    "Communicator",
    "GatherPart",
    "GenericCommunicator",
    "HookGroup",
    "LocalCommunicator",
    "PointToPointCommunicator",
    "ReducePart",
    "ScaledInput",
    "Scratch",
    "Steps",
    "TagSequence",
    "Work",
    "backend_of",
    "backwards_of",
    "communicator_like",
    "communicator_of",
    "communicators_wrapped_by",
    "group_of_both",
    "hook_group_of",
    "is_distributed",
    "let_go_when_destroyed",
    "reduce_numbers",
    "reference_to",
    "release_messages",
    "subgroup_of",
    "world_group",
]

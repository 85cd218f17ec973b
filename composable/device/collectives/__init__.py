"""The only rooms that call torch.distributed's collectives: one algorithm per backend. Know flat tensors, not modules.

Note [Algorithms per backend]
gloo, all ranks on one host: each rank copies what another needs into memory that both see; pipes tell where (`host/`).
gloo, several hosts: point-to-point pairs, straight from the shard into its final place; in large groups gloo's own collectives.
NCCL and other accelerator backends: tensor collectives on a stream of their own, many of them in one launch.
Anything else: plain tensor collectives, asynchronous where the backend is.
"""

from composable.device.collectives.choice import PAIRS_UP_TO, wire_of, wires_wrapped_by
from composable.device.collectives.group import backwards_of
from composable.device.collectives.groups import backend_of, communicator_like, is_distributed, neighbours, world_group
from composable.device.collectives.numbers import reduce_numbers
from composable.device.collectives.pairs import PairsWire
from composable.device.collectives.tensors import StreamsWire, TensorsWire
from composable.device.collectives.wire import (
    Arrival,
    Capabilities,
    Channel,
    GatherPart,
    LocalWire,
    Pending,
    ReducePart,
    Scratch,
    Steps,
    Term,
    Wire,
)

__all__ = [
    "PAIRS_UP_TO",
    "Arrival",
    "Capabilities",
    "Channel",
    "GatherPart",
    "LocalWire",
    "PairsWire",
    "Pending",
    "ReducePart",
    "Scratch",
    "Steps",
    "StreamsWire",
    "TensorsWire",
    "Term",
    "Wire",
    "backend_of",
    "backwards_of",
    "communicator_like",
    "is_distributed",
    "neighbours",
    "reduce_numbers",
    "wire_of",
    "wires_wrapped_by",
    "world_group",
]

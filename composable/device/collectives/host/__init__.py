"""A fast path for ranks of one CPU host, through memory that they share: switchable, and never needed. Knows no unit.

Nothing outside of this folder imports from it but one line of `choice.py`. Without the folder all ranks use sockets.
"""

from composable.device.collectives.host.communicator import host_communicator

__all__ = ["host_communicator"]

"""FSDP2's names over composable.

A script runs unchanged if it imports these names from here instead of from
`torch.distributed.fsdp`. It needs no other import if it runs after `install()`, or with `python -m
composable.fsdp2`.
"""

from torch.distributed import fsdp as _fsdp
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
)

from composable.fsdp2.installation import Installation, install
from composable.fsdp2.module import FSDPModule
from composable.fsdp2.verb import fully_shard, register_fsdp_forward_method, share_comm_ctx

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "Installation",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "install",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
if hasattr(_fsdp, "DataParallelMeshDims"):  # of newer versions of torch
    DataParallelMeshDims = _fsdp.DataParallelMeshDims
    __all__ += ["DataParallelMeshDims"]

"""A device without memory: tensors on it have shapes and no numbers, for worlds of any size.

Must not know what is measured.

PrivateUse1 as a backend in Python, fake tensors and a fake process group. What the host would have
to read raises; what lands on another device raises; memory is counted storage by storage, operation
by operation. There are no numbers, streams or times. A process that has called `install` is good
for nothing else, and ends by `leave`: torch's threads do not outlive such a device.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

NAME = "pretend"


class _Nothing:
    """A stream, and an event: there is one stream only, and nothing takes time."""

    stream_id = device_index = device_type = 0

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def _do_nothing(self, *_: Any, **__: Any) -> _Nothing:
        return self

    record = wait = synchronize = wait_stream = wait_event = record_event = _do_nothing

    def query(self) -> bool:
        return True


class _Module(backend_registration._DummyBackendModule):
    def __getattr__(self, name: str) -> Any:
        if name in ("Stream", "Event", "current_stream", "stream"):
            return lambda *_, **__: _Nothing()
        raise AttributeError(name)

    def set_device(self, device: object) -> None:
        return None


class Watch(TorchDispatchMode):
    """Counts operations, bytes that storages of the device hold, and bytes per rank that
    collectives are given.

    Attributes:
        peak: bytes at most, since `start`.
        operations: by name, since then.
        payloads: bytes per rank of each gather and reduction, by the name of the collective.
        reads: how often the host asked who had gradients; it is told that everybody had all. All
            other reads raise.
    """

    looks_away = False
    reads = 0

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.peak = 0
        self.operations: Counter[str] = Counter()
        self.payloads: list[tuple[str, int]] = []
        self._ranks = ranks
        self._storages: WeakKeyDictionary[torch.UntypedStorage, None] = WeakKeyDictionary()

    def start(self) -> None:
        self.peak = 0
        self.operations.clear()

    @property
    def held(self) -> int:
        return sum(storage.nbytes() for storage in list(self._storages))

    def _note(self, tensor: Tensor) -> None:
        if tensor.device.type == NAME:
            self._storages[tensor.untyped_storage()] = None

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self.looks_away:
            return function(*args, **(kwargs or {}))
        if DTensor in types:
            return NotImplemented  # what it does to local tensors is counted
        self.operations[function.name()] += 1
        tree_map_only(Tensor, self._note, (args, kwargs))
        if function.namespace == "c10d":
            self._note_payloads(function.name(), args)
        # which torch has no fake of
        if function.namespace == "c10d" and "coalesced" in function.name():
            result = FakeWork().boxed()
        elif (
            function is torch.ops.aten._reshape_alias.default
        ):  # whose decomposition asks for memory that kernels do without
            fake = args[0].fake_mode
            with in_kernel_invocation_manager(fake):
                made = function(*args)
            result = FakeTensor(fake, made, args[0].device)
        else:
            result = function(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._note, result)
        self.peak = max(self.peak, self.held)
        return result

    def _note_payloads(self, name: str, args: Any) -> None:
        whole = 0 if "gather" in name else 1 if "reduce_scatter" in name else None
        if whole is None:
            return
        parts = args[whole] if isinstance(args[whole], list) else [args[whole]]
        self.payloads += [
            (name, part.numel() * part.element_size() // self._ranks) for part in parts
        ]


def _unfaked(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with unset_fake_temporarily():
        return function(*args, **options)


def install() -> None:
    """Make the device, and stand in for what reads numbers that fake tensors do not have."""
    import composable.api.annotate
    from composable.comm.base import GroupComm
    from composable.engine.gradients.grad_bucket import GradBucket
    from composable.engine.gradients.post_backward import Buckets

    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())

    learn_shapes = ShardingPropagator._propagate_tensor_meta_non_cached

    # it makes tensors that are fake on every device, as large as what is sharded
    def unseen(*args: Any) -> Any:
        Watch.looks_away = True
        try:
            return learn_shapes(*args)
        finally:
            Watch.looks_away = False

    ShardingPropagator._propagate_tensor_meta_non_cached = unseen  # type: ignore[method-assign]
    GroupComm.min_max = lambda self, values, launch: (list(values), list(values))  # type: ignore[method-assign]
    GroupComm.all_gather_ints = lambda self, values, launch: [list(values)] * self.size  # type: ignore[method-assign]

    Buckets._agree_on_order = lambda self: None  # type: ignore[method-assign]
    decide = GradBucket.decide

    def all_used(bucket: GradBucket) -> None:
        Watch.reads += bool(bucket._undecided)
        bucket._undecided = []
        decide(bucket)

    GradBucket.decide = all_used  # type: ignore[method-assign]
    annotate: Any = composable.api.annotate
    mesh_plan_for, annotate.mesh_plan_for = (
        annotate.mesh_plan_for,
        lambda *args: _unfaked(mesh_plan_for, *args),
    )
    plan: Any = sys.modules["composable.api.mesh"].MeshPlan  # type: ignore[attr-defined]
    # told to the other ranks; a tensor of the mesh has no numbers here
    plan.rows = property(lambda self: torch.empty(0))
    comm_of_all, plan.comm_of_all = plan.comm_of_all, lambda *args: _unfaked(comm_of_all, *args)
    # parameters are of another class
    checks: Any = sys.modules["composable.api.checks"]
    checks.refuse_unfit = checks.refuse_unfit_extension = lambda *_: None
    info_of, annotate.mesh_info_of_shards = (
        annotate.mesh_info_of_shards,
        lambda *args, **options: _unfaked(info_of, *args, **options),
    )


@contextlib.contextmanager
def world_of(ranks: int) -> Iterator[tuple[DeviceMesh, Watch]]:
    """Rank 0 of a world of `ranks`; tensors that the body makes are fake."""
    dist.init_process_group(f"cpu:fake,{NAME}:fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        mesh = init_device_mesh(NAME, (ranks,))
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        # a view that it remembers gives memory back to a storage that was freed
        fake.cache_enabled = False
        with fake, Watch(ranks) as watch:
            yield mesh, watch
    finally:
        gc.collect()
        dist.destroy_process_group()


def leave(code: int = 0) -> None:
    """End the process at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

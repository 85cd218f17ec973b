"""Scale PyTorch models over many ranks by annotating their modules in place."""

import os
import warnings
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from composable import errors, traversal
from composable.api.activations import checkpoint, offload_activations
from composable.api.comm_hooks import register_comm_hook
from composable.api.data_parallel import fully_shard, replicate
from composable.api.explicit_calls import (
    keep_unsharded,
    no_sync,
    reduce_gradients,
    register_forward_method,
    reset,
    reshard,
    unshard,
)
from composable.api.tensor_parallel import apply_tp_plan, declare_part
from composable.config import CPUOffloadPolicy, MixedPrecisionPolicy
from composable.contract.contract import contract, on_undo, registry, remove
from composable.features import traced as _traced  # noqa: F401  (takes its place in the engine)
from composable.fsdp2 import installation as _installation  # noqa: F401  (pipelines see modules)
from composable.optim.clip import clip_grad_norm_
from composable.optim.in_backward import OptimizerInBackward, apply_optimizer_in_backward
from composable.optim.shard_steps import step_on_shards
from composable.policies import (
    CustomPolicy,
    ModelPolicy,
    ModuleWrapPolicy,
    NamePolicy,
    Policy,
    SizePolicy,
)
from composable.report import explain as _explain  # noqa: F401  (takes its place in the engine)
from composable.state.full import Streamed, export, full_state_dict, stream_full

if TYPE_CHECKING:
    from composable.extras.averaging.averaging import (
        HierarchicalAverager,
        LocalSteps,
        PeriodicAverager,
        average_parameters,
        local_steps,
    )
    from composable.extras.averaging.ema import EMA
    from composable.extras.matrices.matrix_steps import step_on_matrices
    from composable.extras.uneven.join import join, joinable, skipped
    from composable.extras.uneven.together import together
    from composable.extras.watch.watch import Watch, watch
    from composable.report.describe import describe
    from composable.state.materialize import load, materialize, refresh
    from composable.state.offload_to_host import HostOffload, offload_to_host
    from composable.state.rebind_optimizer import rebind_optimizer
    from composable.state.summon_full_params import summon_full_params

try:
    __version__ = version("torch-composable")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+unknown"

with suppress(PackageNotFoundError):
    warnings.warn(
        f"the project 'composable' {version('composable')} is installed, too; its files lie in the"
        " same folder as those of torch-composable. Uninstall both, and install torch-composable"
        " again",
        stacklevel=2,
    )

__all__ = [
    "EMA",
    "CPUOffloadPolicy",
    "CustomPolicy",
    "HierarchicalAverager",
    "HostOffload",
    "LocalSteps",
    "MixedPrecisionPolicy",
    "ModelPolicy",
    "ModuleWrapPolicy",
    "NamePolicy",
    "OptimizerInBackward",
    "PeriodicAverager",
    "Policy",
    "SizePolicy",
    "Streamed",
    "Watch",
    "__version__",
    "apply_optimizer_in_backward",
    "apply_tp_plan",
    "average_parameters",
    "checkpoint",
    "clip_grad_norm_",
    "contract",
    "declare_part",
    "describe",
    "errors",
    "export",
    "full_state_dict",
    "fully_shard",
    "join",
    "joinable",
    "keep_unsharded",
    "load",
    "local_steps",
    "materialize",
    "no_sync",
    "offload_activations",
    "offload_to_host",
    "on_undo",
    "rebind_optimizer",
    "reduce_gradients",
    "refresh",
    "register_comm_hook",
    "register_forward_method",
    "registry",
    "remove",
    "replicate",
    "reset",
    "reshard",
    "skipped",
    "step_on_matrices",
    "step_on_shards",
    "stream_full",
    "summon_full_params",
    "together",
    "traversal",
    "unshard",
    "watch",
]

# The extras, and what most programs do not call: loaded when one of their names is first used.
_LAZY = {
    name: f"composable.{module}"
    for module, names in {
        "extras.averaging.averaging": (
            "HierarchicalAverager LocalSteps PeriodicAverager average_parameters local_steps"
        ),
        "extras.averaging.ema": "EMA",
        "extras.matrices.matrix_steps": "step_on_matrices",
        "extras.uneven.join": "join joinable skipped",
        "extras.uneven.together": "together",
        "extras.watch.watch": "Watch watch",
        "report.describe": "describe",
        "state.offload_to_host": "HostOffload offload_to_host",
        "state.materialize": "load materialize refresh",
        "state.rebind_optimizer": "rebind_optimizer",
        "state.summon_full_params": "summon_full_params",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("COMPOSABLE_WATCH", "0").strip() not in ("", "0"):
    import_module("composable.extras.watch.watch")  # watches every model from here on

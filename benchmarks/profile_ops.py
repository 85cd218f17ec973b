"""Where a step's time goes, operator by operator; must not know which step it is.

Self time of an operator is what its own kernel takes. What no operator accounts for is Python,
autograd and waiting.
"""

from __future__ import annotations

import statistics

from harness import BEST, Measure, Rounds, Sample
from publish import table
from torch.profiler import ProfilerActivity, profile

REST = "no operator: Python, autograd, waiting"


class Operators:
    """Wraps what takes a sample: its step under a profiler, as seconds of self time on the host per
    operator.
    """

    def __init__(self, measure: Measure) -> None:
        self._measure = measure

    def __call__(self) -> Sample:
        with profile(activities=[ProfilerActivity.CPU]) as watched:
            step = self._measure()["step"]
        seconds = {event.key: event.self_cpu_time_total / 1e6 for event in watched.key_averages()}
        # Backends' work is shown on threads of their own; beside the step, not inside it.
        operators = {
            name: value for name, value in seconds.items() if name.startswith(("aten::", "fused"))
        }
        return {"step": step, **operators, REST: step - sum(operators.values())}


def operator_table(rounds: Rounds, base: str, *, most: int = 10) -> str:
    """The operators whose time differs most from `base`'s, in milliseconds per step, the largest
    first.
    """
    seen = {
        name: {
            key: statistics.median(sample.get(key, 0.0) for sample in samples) for key in samples[0]
        }
        for name, samples in rounds.items()
    }
    others = [name for name in seen if name != base]
    keys = list(
        dict.fromkeys(
            key for sample in seen.values() for key in sample if key not in ("step", BEST)
        )
    )

    def above(key: str) -> float:
        return max(abs(seen[name].get(key, 0.0) - seen[base].get(key, 0.0)) for name in others)

    chosen = sorted(keys, key=above, reverse=True)[:most]
    rows = [
        [key, *[f"{seen[name].get(key, 0.0) * 1e3:.1f}" for name in (base, *others)]]
        for key in chosen
    ]
    return "Under a profiler, where the difference lies:\n\n" + table(
        ["ms per step", base, *others], rows
    )

"""What programs in which one rank does what it may not are made of, all from one seed; runs nothing.

Note [What is left out]
`LEAVES_OUT` names what programs do not do because it is known not to work.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from tests.helpers.programs import Node, tree_of

# Who leaves a backward of them out is named by all ranks, but stays one batch behind (docs/decisions/0019-rounds.md), so its
# last slot has no partner. tests/whole/test_replicated_steps_left.py has those.
REPLICATED: Final = "replicated units"
# Each counts its own steps: a rank that raises between two of them has opened fewer of the second (decision 16).
ROOTS: Final = "several roots"

LEAVES_OUT: Final[set[str]] = {REPLICATED, ROOTS}  # see Note [What is left out]

# What one rank does in place of training.
RAISES_FORWARD: Final = "raises in forward"
RAISES_AFTER: Final = "raises behind a module's forward"
RAISES_BACKWARD: Final = "raises in backward"
RAISES_AGAIN: Final = "raises when it recomputes"
DROPS: Final = "drops its loss"
REPEATS: Final = "runs backward twice"
EVALUATES: Final = "evaluates"
KEEPS: Final = "runs backward one slot later"
SKIPS: Final = "skips a module"
REORDERS: Final = "calls modules in another order"
CALLS_MORE: Final = "calls a module once more"
# What all ranks do.
FREES: Final = "runs backward through a graph that is freed"
WRITES: Final = "writes to parameters before backward"
# What one rank annotates in another way.
RESHARDS: Final = "reshards otherwise"
GROWS: Final = "has a layer more"
OMITS: Final = "leaves a module un-annotated"

FAULTS: Final = (
    *(RAISES_FORWARD, RAISES_AFTER, RAISES_BACKWARD, RAISES_AGAIN, DROPS, REPEATS, EVALUATES, KEEPS),
    *(SKIPS, REORDERS, CALLS_MORE, FREES, WRITES),
)
OF_ANNOTATION: Final = (RESHARDS, GROWS, OMITS)


@dataclass(frozen=True)
class IllegalPlan:
    """All that a seed decides.

    Attributes:
        slots: what all ranks do: "train", "keep" (the loss, for the backward of the next slot) or "evaluate".
        fault: what happens in slot `at`, on rank `culprit`, in or to the module `where`.
    """

    seed: int
    tree: Node
    slots: tuple[str, ...]
    fault: str
    culprit: int
    at: int
    where: str
    leave_out: float
    delays: bool

    def __str__(self) -> str:
        slots = " ".join(self.slots)
        return f"seed {self.seed}: {self.tree}; {slots}; in slot {self.at}, rank {self.culprit} {self.fault} ({self.where})"


def illegal_plan_of(seed: int, ranks: int) -> IllegalPlan:
    draw = random.Random(f"illegal {seed}")
    flavours = ("shard",) if REPLICATED in LEAVES_OUT else ("shard", "shard", "mixed", "replicate")
    tree = tree_of(draw, ranks, flavours)
    if not tree.verbs and ROOTS in LEAVES_OUT:
        tree.verbs = ("shard",)
    annotated = draw.random() < 0.85
    fault = draw.choice(FAULTS if annotated else OF_ANNOTATION)
    if fault == WRITES and any("checkpoint" in node.verbs for node in tree.everything()):
        fault = FREES  # what is recomputed saves no parameters, so that autograd notices no write, in one process neither
    before = [draw.choice(["train", "train", "keep", "evaluate"]) for _ in range(draw.randint(0, 3))]
    after = [draw.choice(["train", "train", "train", "evaluate"]) for _ in range(draw.randint(3, 4))]
    slots = (*before, "train", *after, "train", "train")
    where = draw.choice(_places(tree, fault))
    return IllegalPlan(
        seed,
        tree,
        slots,
        fault,
        draw.randrange(ranks),
        len(before),
        where,
        draw.choice([0.0, 0.2, 0.5]),
        draw.random() < 0.5,
    )


def _places(tree: Node, fault: str) -> list[str]:
    """The modules to which a fault can happen."""
    nodes = list(tree.everything())
    units = [node for node in nodes if node.verbs and not node.listed]
    found = {
        SKIPS: [node for node in nodes if node is not tree],
        CALLS_MORE: [node for node in nodes if node is not tree],
        REORDERS: [node for node in nodes if len(node.inside) > 1],
        RAISES_AGAIN: [inner for node in nodes if "checkpoint" in node.verbs for inner in node.everything()],
        RESHARDS: [node for node in units if "shard" in node.verbs and node.layers],
        GROWS: [node for node in nodes if node.verbs],
        OMITS: [node for node in units if node is not units[0]],  # another annotation comes later on all ranks
    }.get(fault, nodes)
    return [node.name for node in found] or [""]

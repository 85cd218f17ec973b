"""Ranks that part ways: what is compared in the first forward, and what is said later; moves nothing, decides no order.

Note [Steps]
Every forward of a root opens a step, and tags hold its number: messages of one step never meet those of another. A rank that
left a step half-way and one that went through all of it open the next one with the same number, so they meet there. Who still
waits in the step before would wait for good: a rank that leaves one tells why, and whatever it says in a later step tells as
much. Both raise where somebody waits, and that rank leaves the step, too.
Ranks that run different units in one step come to wait for each other, and are told where one sees that both wait.
An interrupt that reaches all ranks finds them in different forwards of the same step of the program, if gradients are
accumulated, or before and after they have opened one. So their numbers differ afterwards. A rank that was interrupted, and
finds the others in a later step before anything of its own has come about, goes on to theirs.
So does one that has lost the step before to an error, as all have, if a window of accumulation has ended for others only.
Where messages do not travel by themselves (sockets, NCCL) the group's timeout ends the waiting, by name.
docs/decisions/0016-steps.md has the whole story.
"""

from __future__ import annotations

from collections.abc import Sequence

from composable.device.collectives import Steps
from composable.errors import CommunicationError, RanksDisagreeError
from composable.runtime.handle import Handle
from composable.runtime.mesh_info import MeshInfo


def check_order(handles: Sequence[Handle], known: Sequence[Handle], index: int, mesh_info: MeshInfo) -> None:
    """In the first forward, make sure that every rank runs the same unit; later ones are gathered by name.

    Args:
        known: the handles, first those that other ranks know from former roots.
    """
    communicator = mesh_info.all
    if communicator.size == 1:
        return
    # Ranks that have come to different units meet here, and are told of those that have left the step.
    tags = next(handle.tags.checks for handle in known if handle.mesh_info.place == mesh_info.place)
    label = f"check of the order of units below unit '{handles[0].name}'"
    lowest, highest = communicator.min_max([index], label=label, tags=tags)
    if lowest != highest:
        running = [row[0] for row in communicator.all_gather_ints([index], label=label, tags=tags)]
        names = [f"'{handles[i].name}'" if i < len(handles) else "no further unit" for i in running]
        seen = "; ".join(f"rank {rank} runs {name}" for rank, name in enumerate(names))
        raise RanksDisagreeError(
            f"the ranks run their modules in different orders in the first forward: {seen}. "
            "All ranks must run the same fully sharded modules in the same order."
        )


def say_farewell(handles: Sequence[Handle], why: str) -> None:
    """Those who wait for this rank in the step that it leaves are told, where messages travel by themselves."""
    for handle in handles:
        handle.tags.say_farewell(why)


def catch_up(handles: Sequence[Handle], steps: Steps, error: CommunicationError) -> bool:
    """Go on to the step that others are in, see Note [Steps]. False if this is no time for it."""
    later = error.later_step
    if later is None or not steps.may_go_on_to(later):
        return False
    for handle in handles:
        handle.withdraw()
    steps.catch_up(later)
    return True

"""`empty_host_cache`: memory that is kept on the host for steps to come goes back on request; frees nothing in use."""

from composable.compilation import untraced
from composable.device.collectives import release_messages
from composable.device.memory import HOST_MEMORY


@untraced
def empty_host_cache() -> None:
    """Give memory of the host back to the system that is kept for the next step, as `torch.cuda.empty_cache` does on a device.

    That is the memory of unsharded parameters and gradients of models on CPU that are not needed now, of models that are gone,
    and of messages through shared memory that no rank reads any more. What is in use, or in flight, stays. The next step takes
    what it needs anew, which costs it page faults: worth it between phases of a program, not between steps. A rank may call it
    by itself; memory that others read is theirs to give back. When a process group is destroyed, its messages' memory goes back
    without this.

    Example:
        >>> model = fully_shard(nn.Linear(4, 4))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> del model
        >>> empty_host_cache()
    """
    HOST_MEMORY.clear()
    release_messages()

"""The plan of the house: each power is used in its room only, rooms are small and say what they are for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

import composable

ROOT: Final = Path(composable.__file__).parent
DEMO: Final = "demo/"  # written as a user would write it: it may do what users do

LONGEST: Final = 400
# Rooms that ought to be two by now; none may join them, and they leave when they are.
TOO_LONG: Final[tuple[str, ...]] = ()
MOST: Final = 15
# Classes that have several jobs; none may join them, and they leave when they are divided.
TOO_MANY_METHODS: Final[tuple[str, ...]] = ()

# Names that stand for powers: what modules hold, when we are called back, memory, time, changes of state.
POWERS: Final = (
    # What modules hold. Registries are written by storage (which form of a parameter is seen) and by undoing.
    "_parameters",
    "_buffers",
    "_modules",
    "__dict__",
    # When we are called back.
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_multi_grad_hook",
    "register_hook",
    "register_prehook",
    "register_post_accumulate_grad_hook",
    "_forward_pre_hooks",
    "_forward_hooks",
    "queue_callback",
    "at_end_of_backward",
    # Memory.
    "resize_",
    "set_",
    "untyped_storage",
    "UntypedStorage",
    "view_without_memory",
    "swap_memory",
    "_local_tensor",
    "set_local",
    "_version",
    # Time.
    "Stream",
    "Event",
    "current_stream",
    "wait_event",
    "wait_stream",
    "record_stream",
    "synchronize",
    # Changes of state.
    "advance",
    "advance_gradients",
)

# Which room uses which of them, a line per room, so that work on two rooms meets in no line. A new user of a power belongs into
# a room that has it, or this table tells why not.
USED_IN: Final = {
    "api/devices.py": "_buffers",
    "device/buffer_swap.py": "_buffers",
    "device/cast_parameters.py": "_parameters _version",
    "device/elastic_buffer.py": "untyped_storage UntypedStorage view_without_memory swap_memory",
    "device/host_copies.py": "untyped_storage UntypedStorage _version",
    "device/means_apart.py": "_version",
    "device/memory.py": "resize_ set_ untyped_storage UntypedStorage swap_memory",
    "device/parameter_forms.py": "set_local",
    "device/parameter_swap.py": "_parameters",
    "device/private.py": "queue_callback at_end_of_backward untyped_storage UntypedStorage swap_memory view_without_memory "
    "_local_tensor set_local",
    "device/running_statistics.py": "_buffers",
    "device/saved_tensors.py": "untyped_storage UntypedStorage _version",
    "device/sharded_gradients.py": "untyped_storage",
    "device/streams.py": "Stream Event current_stream wait_event wait_stream synchronize",
    "model/hooks.py": "register_forward_pre_hook register_forward_hook register_hook register_prehook "
    "_forward_pre_hooks _forward_hooks",
    "model/record.py": "_modules",
    "model/traversal.py": "_parameters _modules",
    "model/values.py": "__dict__",
    "optim/scalars.py": "_version",
    "optim/step_on_shards.py": "__dict__",
    "plan/phases.py": "advance advance_gradients",
    "runtime/backward_end.py": "at_end_of_backward",
    "runtime/bucket.py": "advance_gradients",
    "runtime/buffer_broadcast.py": "_buffers",
    "runtime/dtype_group.py": "untyped_storage _version",
    "runtime/gradient_hooks.py": "register_post_accumulate_grad_hook",
    "runtime/gradients.py": "advance_gradients",
    "runtime/handle.py": "advance",
    "runtime/replicated_parameters.py": "_parameters",
    "runtime/resting_form.py": "_version",
    "runtime/term_hooks.py": "register_hook",
}
ROOMS_OF: Final = {power: [room for room, powers in USED_IN.items() if power in powers.split()] for power in POWERS}

COLLECTIVES: Final = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)


def rooms() -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.rglob("*.py"))]


@cache
def source(room: str) -> str:
    return (ROOT / room).read_text()


@cache
def tree(room: str) -> ast.Module:
    return ast.parse(source(room))


def names(node: ast.AST) -> Iterator[str]:
    """Every name that code reads, writes or defines, as a variable, an attribute, an import or a function."""
    for below in ast.walk(node):
        if isinstance(below, ast.Attribute):
            yield below.attr
        elif isinstance(below, ast.Name):
            yield below.id
        elif isinstance(below, ast.alias):
            yield below.name.rpartition(".")[2]
        elif isinstance(below, (ast.FunctionDef, ast.ClassDef)):
            yield below.name


def test_there_is_a_house() -> None:
    assert "__init__.py" in rooms()
    assert len(rooms()) > 40


def owners(power: str) -> list[str]:
    return [room for room in rooms() if power in names(tree(room)) and not room.startswith(DEMO)]


def test_the_search_for_owners_finds_attributes_variables_imports_and_definitions() -> None:
    for code in ("x.power()", "power = 1", "from a import power", "def power(): ...", "import a.power", "y = {**x.power}"):
        assert "power" in names(ast.parse(code)), code
    assert "power" not in names(ast.parse("'power'  # power"))


@pytest.mark.parametrize("power", [power for power in POWERS if power != "Event"])
def test_each_power_is_used_in_its_own_rooms_only(power: str) -> None:
    assert owners(power) == ROOMS_OF[power]


def test_the_table_of_powers_names_nothing_else() -> None:
    assert [power for powers in USED_IN.values() for power in powers.split() if power not in POWERS] == []
    assert list(USED_IN) == sorted(USED_IN)


def test_events_of_devices_are_made_in_one_room() -> None:
    """The word also names what happens to a handle; here, only torch's is meant."""
    made = [room for room in rooms() if re.search(r"\btorch\.(\w+\.)?Event\b", source(room))]
    assert made == ROOMS_OF["Event"]


def _distributed(room: str) -> Iterator[str]:
    """Functions of torch.distributed, and methods of groups, that a room calls or hands on."""
    for node in ast.walk(tree(room)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("torch.distributed"):
            yield from (alias.name for alias in node.names if alias.name in COLLECTIVES)
        if not isinstance(node, ast.Attribute) or node.attr not in COLLECTIVES:
            continue
        written = ast.unparse(node.value)
        if written.endswith(("dist", "distributed", "group", "funcol", "_functional_collectives")):
            yield node.attr


def test_only_one_corridor_talks_to_other_ranks() -> None:
    talkers = {room: sorted(dict.fromkeys(_distributed(room))) for room in rooms() if not room.startswith(DEMO)}
    talkers = {room: calls for room, calls in talkers.items() if calls}
    assert all(room.startswith("device/collectives/") for room in talkers), talkers
    for call in ("all_reduce", "broadcast", "new_group", "recv", "send"):
        assert any(call in calls for calls in talkers.values()), "the search finds what is there"


def test_private_parts_of_torch_distributed_are_used_in_rooms_of_their_own() -> None:
    users = [
        room for room in rooms() if re.search(r"\bdist\._|distributed_c10d|torch\._C\b|_functional_collectives", source(room))
    ]
    assert users == ["compilation.py", "device/private.py", "device/private_groups.py"]


def test_the_compiler_is_known_in_one_room() -> None:
    users = [room for room in rooms() if re.search(r"_dynamo|torch\.compiler\.(disable|reset)|_orig_mod", source(room))]
    assert users == ["compilation.py"]


@pytest.mark.parametrize("room", rooms())
def test_imports_stand_at_the_top(room: str) -> None:
    """Inside a function the layers of the house could not be checked."""
    inside = [
        f"line {node.lineno}"
        for function in ast.walk(tree(room))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    assert inside == []


@pytest.mark.parametrize("room", rooms())
def test_every_room_says_what_it_is_for(room: str) -> None:
    text = ast.get_docstring(tree(room))
    assert text, "no docstring"
    assert len(text.split()) > 5, "a name is not a purpose"
    assert text.rstrip().endswith((".", "!", "?", "::")) or "\n" in text


def test_rooms_are_small() -> None:
    long = [room for room in rooms() if len(source(room).splitlines()) > LONGEST]
    assert tuple(long) == TOO_LONG


@cache
def methods_of_classes(room: str) -> dict[str, int]:
    """How many methods each class of a room has, properties and the like among them."""
    classes = [node for node in ast.walk(tree(room)) if isinstance(node, ast.ClassDef)]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {each.name: len(dict.fromkeys(node.name for node in each.body if isinstance(node, kinds))) for each in classes}


def test_classes_have_one_job() -> None:
    """Whoever has more methods than a reader keeps in mind has two jobs, and can be divided by them."""
    crowded = [f"{room} {name}" for room in rooms() for name, count in methods_of_classes(room).items() if count > MOST]
    assert tuple(crowded) == TOO_MANY_METHODS


def test_the_count_of_methods_finds_those_that_there_are() -> None:
    counts = [count for room in rooms() for count in methods_of_classes(room).values()]
    assert len(counts) > 150
    assert max(counts) > MOST - 5


THOUGHT: Final = ("errors.py", *(room for room in rooms() if room.startswith("plan/")))


@pytest.mark.parametrize("room", THOUGHT)
def test_thought_needs_no_torch(room: str) -> None:
    imported = [
        name
        for node in ast.walk(tree(room))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    ]
    assert not [name for name in imported if name.split(".")[0] == "torch"]


# What depends on the device is a field of `Capabilities`, which tests can give to tensors of the host. Which rooms ask a tensor
# or a mesh what type of device it has nevertheless, and what for. What is on meta has no values, which anybody may ask.
ASK_FOR_TYPES: Final = {
    "api/devices.py": "whether what is annotated is where the ranks communicate",
    "api/meshes.py": "where the ranks of a mesh communicate",
    "device/collectives/choice.py": "here it is decided which communicator, and so which capabilities, there are",
    "device/collectives/host/communicator.py": "whether a tensor can be in shared memory",
    "device/collectives/local.py": "as choice.py, for one rank",
    "device/host_numbers.py": "whether a copy leaves the host",
    "device/memory.py": "whether a storage can be lent memory of the host",
    "device/parameter_forms.py": "whether a local tensor rests where its ranks communicate",
    "device/streams.py": "whether there are streams",
    "optim/gradient_norm.py": "whether a number lies where it can be read at once",
    "optim/scalars.py": "the same, of a scalar of an optimizer's state, which may lie on the host while parameters do not",
    "optim/spans.py": "whether it is a CPU's kernels that compute, which do not round alike everywhere in a tensor",
    "runtime/group_builder.py": "whether a parameter is where it belongs",
    "runtime/registered.py": "the same, of one that was moved",
    "runtime/resting_form.py": "whether a parameter is where it belongs",
    "runtime/torchs_clipping.py": "whether gradients rest where their ranks communicate",
    "runtime/torchs_scaler.py": "whether a number lies where it can be read at once",
}
_ASKS: Final = re.compile(r"(\.type|device_type)\b (==|!=|in|not in) (?!\"meta\")|\bis_(cpu|cuda)\b")


def test_what_depends_on_the_device_is_asked_of_communicators() -> None:
    asking = [room for room in rooms() if _ASKS.search(source(room)) and not room.startswith(DEMO)]
    assert asking == list(ASK_FOR_TYPES)


@pytest.mark.parametrize("room", rooms())
def test_no_order_depends_on_a_set(room: str) -> None:
    """Sets are iterated in an order that differs between ranks; collectives would not meet."""
    loops = [node.iter for node in ast.walk(tree(room)) if isinstance(node, (ast.For, ast.comprehension))]
    suspects = [
        ast.unparse(loop)
        for loop in loops
        if isinstance(loop, (ast.Set, ast.SetComp))
        or (isinstance(loop, ast.Call) and isinstance(loop.func, ast.Name) and loop.func.id in ("set", "frozenset"))
    ]
    assert suspects == []


def test_the_front_door_opens_to_what_it_names() -> None:
    assert sorted(composable.__all__) == composable.__all__, "sorted, so that nothing hides"
    for name in composable.__all__:
        assert hasattr(composable, name)

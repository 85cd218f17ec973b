"""Makes a plan of `branches.py` smaller while it fails as before: the fewest operations, parts,
annotations, ways and events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.helpers.branches import Op, Part, Plan, Unit


def smallest(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """A plan of which nothing can be taken away without `fails` saying otherwise."""
    found = True
    while found:
        found = False
        for smaller in _smaller(plan):
            if smaller != plan and fails(smaller):
                plan, found = smaller, True
                break
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans with one thing less; those with the most less come first."""
    for length in range(1, len(plan.ops)):
        yield _tidy(replace(plan, ops=plan.ops[:length]))
    for index, op in enumerate(plan.ops):
        yield _tidy(replace(plan, ops=(*plan.ops[:index], *plan.ops[index + 1 :])))
        for number in op.numbers if len(op.numbers) > 1 else ():
            yield _with_op(
                plan,
                index,
                replace(op, numbers=tuple(each for each in op.numbers if each != number)),
            )
        for name in op.names if len(op.names) > 1 else ():
            yield _with_op(
                plan, index, replace(op, names=tuple(each for each in op.names if each != name))
            )
        if any(op.ways):
            yield _with_op(plan, index, replace(op, ways=({},) * plan.ranks))
            for place in dict.fromkeys(place for ways in op.ways for place in ways):
                less = tuple(
                    {where: way for where, way in ways.items() if where != place}
                    for ways in op.ways
                )
                yield _with_op(plan, index, replace(op, ways=less))
            for rank in range(plan.ranks):
                yield _with_op(
                    plan,
                    index,
                    replace(op, ways=tuple({} if r == rank else w for r, w in enumerate(op.ways))),
                )
        if op.how or op.retain:
            yield _with_op(plan, index, replace(op, how="", retain=False))
    if len(plan.roots) > 1:
        for root in plan.roots:
            yield _tidy(replace(plan, roots=tuple(each for each in plan.roots if each != root)))
    for number, root in enumerate(plan.roots):
        yield replace(
            plan,
            roots=(*plan.roots[:number], replace(root, beside=False), *plan.roots[number + 1 :]),
        )
        for index in range(len(root.chain)) if len(root.chain) > 1 else ():
            yield _without_place(plan, number, index)
    for index, part in enumerate(plan.parts):
        for less in _smaller_part(part):
            yield _tidy(replace(plan, parts=(*plan.parts[:index], less, *plan.parts[index + 1 :])))
    for number, root in enumerate(plan.roots):
        for unit in _simpler(root.unit):
            yield replace(
                plan,
                roots=(*plan.roots[:number], replace(root, unit=unit), *plan.roots[number + 1 :]),
            )
    yield replace(plan, optimizer="sgd")
    yield replace(plan, tensor=1)
    if "hybrid" not in "".join(map(str, (*plan.roots, *plan.parts))):
        yield replace(plan, replicas=0)
    yield replace(plan, input_grad=True)
    for name in plan.frozen:
        yield replace(plan, frozen=tuple(each for each in plan.frozen if each != name))


def _simpler(unit: Unit | None) -> Iterator[Unit]:
    if unit is not None:
        yield replace(unit, grad_reduce="mean")
        yield replace(unit, hybrid=False)
        yield replace(unit, reshard=True)
        yield replace(unit, prefetch=1)
        yield replace(unit, views=False)


def _smaller_part(part: Part) -> Iterator[Part]:
    yield replace(part, sparse=False)
    yield replace(part, form="")
    yield replace(part, checkpoint=False)
    yield replace(part, unit=None)
    for unit in _simpler(part.unit):
        yield replace(part, unit=unit)
    for index, inner in enumerate(part.inside):
        yield replace(part, inside=(*part.inside[:index], *part.inside[index + 1 :]))
        for less in _smaller_part(inner):
            yield replace(part, inside=(*part.inside[:index], less, *part.inside[index + 1 :]))


def _with_op(plan: Plan, index: int, op: Op) -> Plan:
    return _tidy(replace(plan, ops=(*plan.ops[:index], op, *plan.ops[index + 1 :])))


def _without_place(plan: Plan, number: int, gone: int) -> Plan:
    """Without one call in a root's chain; the calls behind it move up."""
    root = plan.roots[number]

    def moved(ways: dict[str, str]) -> dict[str, str]:
        found = {}
        for place, way in ways.items():
            index, _, rest = place.partition(".")
            if int(index) != gone:
                found[f"{int(index) - (int(index) > gone)}.{rest}"] = way
        return found

    ops = tuple(
        (
            replace(op, ways=tuple(moved(dict(ways)) for ways in op.ways))
            if op.root == root.name
            else op
        )
        for op in plan.ops
    )
    less = replace(root, chain=(*root.chain[:gone], *root.chain[gone + 1 :]))
    return _tidy(
        replace(plan, roots=(*plan.roots[:number], less, *plan.roots[number + 1 :]), ops=ops)
    )


def _tidy(plan: Plan) -> Plan:
    """Without operations and names of what is not there any more."""
    roots = [root.name for root in plan.roots]
    parts = tuple(
        part for part in plan.parts if any(part.name in root.chain for root in plan.roots)
    )
    left = [*roots, *(each.name for part in parts for each in part.everything())]
    ops: list[Op] = []
    forwards: set[int] = set()
    models = 1
    held: frozenset[int] = frozenset()
    goes_on = False

    def there(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name.split(".")[0] in left)

    for op in plan.ops:
        if op.model >= models or (op.root and op.root not in roots):
            continue
        if op.kind == "backward":
            op = replace(op, numbers=tuple(number for number in op.numbers if number in forwards))
            if not op.numbers:
                continue
            forwards -= set() if op.retain else set(op.numbers)
        if op.kind in ("freeze", "unfreeze"):
            op = replace(op, names=there(op.names))
            if not op.names:
                continue
        if (op.kind == "event" and (forwards or held)) or (op.kind == "resume" and not goes_on):
            continue  # events are legal between steps
        goes_on = goes_on or op.kind == "event"
        if op.kind == "forward":
            forwards |= set(op.numbers)
        held = plan.held_after(op, held)
        models += op.kind == "copy"
        ops.append(op)
    return replace(plan, parts=parts, ops=tuple(ops), frozen=there(plan.frozen))

"""The virtual machine of `composable.forecast`, as torch's own programs ask for its streams."""

from __future__ import annotations

from typing import Any

from composable.extras.forecast.machine import Event, Machine


class _Event(Event):
    def record(self, stream: _Stream | None = None) -> _Event:
        machine = self._machine
        self.moment = machine.ready[machine.current if stream is None else stream.name]
        return self

    wait = Event.join


class _Stream:
    def __init__(self, machine: Machine, name: str) -> None:
        self._machine = machine
        self.name = name
        machine.ready.setdefault(name, 0.0)

    def wait_stream(self, other: _Stream) -> None:
        self.wait(self._machine.ready[other.name])

    def wait_event(self, event: _Event) -> None:
        self.wait(event.moment)

    def wait(self, moment: float) -> None:
        self._machine.ready[self.name] = max(self._machine.ready[self.name], moment)

    def record_event(self) -> _Event:
        return _Event(self._machine).record(self)


class DeviceModule:
    """The machine's streams, as torch's own programs ask a module like `torch.cuda` for them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._count = 0

    def Stream(self, *_: Any, **__: Any) -> _Stream:
        self._count += 1
        return _Stream(self._machine, f"stream {self._count}")

    def Event(self, *_: Any, **__: Any) -> _Event:
        return _Event(self._machine)

    def current_stream(self, *_: Any) -> _Stream:
        return _Stream(self._machine, self._machine.current)

    def stream(self, stream: _Stream) -> Any:
        return self._machine.switched(stream.name)

    def current_device(self) -> int:
        return 0

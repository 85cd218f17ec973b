"""What an object knows is changed in the file of its class; others call a method that says what
happened. What must be exchanged in torch is in `torch_private.py`.
"""

from __future__ import annotations

import ast

from docs.counts import PACKAGE, Source, exchanged, foreign_writes, sources


def _source(path: str, text: str) -> Source:
    return Source(path, text, ast.parse(text))


def test_only_the_file_of_a_class_changes_its_attributes() -> None:
    assert foreign_writes(sources(PACKAGE)) == []


def test_assignments_items_and_changes_of_containers_from_another_file_are_found() -> None:
    files = [
        _source(
            "of_the_class.py", "class A:\n    def f(self):\n        self.x = self.y = self.z = []"
        ),
        _source(
            "another.py",
            "a.x = 1\nb.a.y[0] = 1\na.z.append(1)\ndel a.x\na.x.count(1)\nself.x = 1",
        ),
    ]
    lines = [(line, name) for path, line, name in foreign_writes(files) if path == "another.py"]
    assert lines == [(1, "x"), (2, "y"), (3, "z"), (4, "x")]


def test_attributes_of_other_modules_and_classes_are_set_in_torch_private_only() -> None:
    sets = exchanged(sources(PACKAGE))
    assert {path for path, _, _ in sets} == {"torch_private.py"}


def test_what_sets_an_attribute_of_another_module_or_class_is_found() -> None:
    text = """
from unittest.mock import patch
import sys
import torch
from torch.optim import SGD, Adam
torch.nn.Linear.forward = None
setattr(SGD, "step", None)
vars(SGD)["step"] = None
del Adam.step
for kind in (SGD, Adam):
    setattr(kind, "step", None)
def f():
    setattr(sys.modules["torch"], "ones", None)
    with patch.object(torch, "ones"):
        pass
class Own:
    pass
Own.x = 1
setattr(Own, "y", 1)
def g(torch):
    torch.ones = 1
    vars(torch)["ones"] = SGD.step
"""
    lines = [line for _, line, _ in exchanged([_source("some.py", text)])]
    assert lines == [6, 7, 8, 9, 11, 13, 14]

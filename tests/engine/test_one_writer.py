"""What an object knows is changed in the file of its class; others call a method that says what
happened.
"""

from __future__ import annotations

import ast

from docs.counts import ENGINE, Source, foreign_writes, sources


def test_only_the_file_of_a_class_changes_its_attributes() -> None:
    assert list(foreign_writes(sources(ENGINE))) == []


def test_assignments_items_and_changes_of_containers_from_another_file_are_found() -> None:
    texts = {
        "of_the_class.py": "class A:\n    def f(self):\n        self.x = self.y = self.z = []",
        "another.py": "a.x = 1\nb.a.y[0] = 1\na.z.append(1)\ndel a.x\na.x.count(1)\nself.x = 1",
    }
    files = [Source(path, text, ast.parse(text)) for path, text in texts.items()]
    lines = [(line, name) for path, line, name in foreign_writes(files) if path == "another.py"]
    assert lines == [(1, "x"), (2, "y"), (3, "z"), (4, "x")]

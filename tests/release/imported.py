"""Import all public names of the installed package, and say which packages it brought.

Arguments: the only packages that may be there, besides what they need themselves.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distribution, distributions, version

import composable
import composable.forecast

for name in composable.__all__:
    getattr(composable, name)
assert composable.__version__ == version("torch-composable")
assert "site-packages" in composable.__file__, composable.__file__


def needed(name: str) -> set[str]:
    """A package and what it needs, by the names that are installed."""
    found, todo = set(), [name]
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name not in found and name in installed:
            found.add(name)
            for each in distribution(name).requires or []:
                if "extra ==" not in each:
                    todo.append(re.match(r"[\w.-]+", each)[0])
    return found


installed = {re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower() for each in distributions()}
if len(sys.argv) > 1:
    allowed = {"torch-composable", "pip", "setuptools"}.union(*map(needed, sys.argv[1:]))
    assert installed <= allowed, f"more than that: {sorted(installed - allowed)}"
print(f"composable {composable.__version__}: {len(composable.__all__)} names")
print(f"{len(installed)} packages are installed")

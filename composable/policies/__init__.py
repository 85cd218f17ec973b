"""Which modules the user means: rules that pick modules out of a tree.

The idea of one object that maps a root to modules and keyword overrides, for every verb alike, is
that of https://github.com/pytorch/pytorch/pull/104969.
"""

from composable.policies.base import Policy, Selection
from composable.policies.rules import (
    CustomPolicy,
    ModelPolicy,
    ModuleWrapPolicy,
    NamePolicy,
    SizePolicy,
)
from composable.policies.select import PolicyLike, as_policy, select_modules

__all__ = [
    "CustomPolicy",
    "ModelPolicy",
    "ModuleWrapPolicy",
    "NamePolicy",
    "Policy",
    "PolicyLike",
    "Selection",
    "SizePolicy",
    "as_policy",
    "select_modules",
]

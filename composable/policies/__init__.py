"""Which modules the user means: rules that pick modules out of a tree.

For every verb, one object maps a root to modules and keyword overrides. This idea is from
https://github.com/pytorch/pytorch/pull/104969.
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

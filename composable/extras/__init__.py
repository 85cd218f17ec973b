"""Capabilities above the core, one each. The core does not import them, and none imports another.

Public names are those of `composable`, which loads an extra when one of its names is first used.
"""

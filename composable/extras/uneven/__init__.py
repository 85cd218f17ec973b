"""Ranks that do different things in a step: `join`, `skipped`, `together`."""

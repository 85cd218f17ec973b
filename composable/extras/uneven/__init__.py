"""Ranks that do not do the same in a step: `join`, `skipped`, `together`."""

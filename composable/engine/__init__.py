"""The engine of both verbs: units, roots, parameter groups and gradient buckets; see docs/tour.md
for one step through it.
"""

"""The module tree: what was said about it, its order, its hooks; moves no tensor and never communicates."""

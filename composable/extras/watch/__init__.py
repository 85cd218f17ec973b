"""Find what goes wrong in a step, and name it.

It finds the first value that is not finite, ranks that differ, and units that do not compute the
same twice.
"""

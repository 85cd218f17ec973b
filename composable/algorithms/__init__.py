"""What goes beyond a step that is alike on all ranks.

It is built on public parts and on the seams of the engine.
"""

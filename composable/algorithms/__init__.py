"""What goes beyond a step that is alike on all ranks, on public parts and the seams of the
engine.
"""

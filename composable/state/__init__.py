"""Initialise, look into, edit, save, load and average annotated models; must not know how a step
runs.
"""

"""Initialise, look into, edit, save, load and average annotated models.

This package must not know how a step runs.
"""

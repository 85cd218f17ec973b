"""Initialise, look into, edit, save and load annotated models.

This package must not know how a step runs.
"""

"""Readers: they look at annotated models and change nothing."""

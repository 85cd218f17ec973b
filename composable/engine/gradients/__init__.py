"""Gradients of units: taken from autograd, reduced, and put on parameters."""

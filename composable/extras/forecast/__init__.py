"""Predict, without the devices, whether a model fits, what is sent, and how long a step takes."""

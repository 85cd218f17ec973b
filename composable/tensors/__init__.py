"""Tensors, without what a step does with them: tensors of users' classes, and `DTensor`s."""

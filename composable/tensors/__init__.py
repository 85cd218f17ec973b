"""Helpers for `DTensor`s and for tensors of users' classes. They do not depend on a step."""

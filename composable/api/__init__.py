"""The public functions: the four verbs, scopes and explicit calls.

They check arguments and call the engine.
"""

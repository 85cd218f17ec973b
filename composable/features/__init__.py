"""Optional parts of a step. Each file attaches at a seam of the engine (docs/architecture.md), so
you can read the engine without it. The engine checks for them only by flags such as
`ParamGroup.extended`.
"""

"""What a step may have, and is read without: each file attaches at a seam of the engine
(docs/architecture.md), which asks what is there by flags such as `ParamGroup.extended`.
"""

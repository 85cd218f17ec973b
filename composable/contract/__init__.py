"""Annotations of modules.

An annotation records which verb was applied to a module, how to undo it, and its forward hooks.

Nothing here communicates or knows what a verb does. Import from the modules of this package, as in
`from composable.contract.contract import registry`: the package exports the function `contract`
under this package's name.
"""

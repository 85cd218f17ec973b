"""Annotations of modules.

They say what was applied to which module, how it is undone, and which forward hooks it runs in.

Nothing here communicates or knows what a verb does. Import from the modules of this package, as in
`from composable.contract.contract import registry`: the package exports the function `contract`
under this package's name.
"""

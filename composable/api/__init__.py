"""The verbs: each validates, plans and attaches, and fits on a screen."""

"""What is kept of parameters beside themselves: how optimizers step them; above the verbs, on which it builds."""

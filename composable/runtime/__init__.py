"""Behaviour: puts a plan, a storage and collectives together, and decides when each of them acts."""

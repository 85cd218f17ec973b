"""What the engine does not know: each file attaches at one seam of it (docs/architecture.md)."""

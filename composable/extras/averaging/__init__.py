"""Averages of parameters: over steps (`EMA`), and over ranks that train apart."""

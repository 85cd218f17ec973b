"""Device memory and streams. No module in this package knows units or collectives."""

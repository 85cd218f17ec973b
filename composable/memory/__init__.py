"""Device memory, streams and the parts of torch that are not public. No module in this package
knows units or collectives.
"""

"""A simulated accelerator, which finds missing waits, and tests that run on nothing else; knows no
other test.
"""

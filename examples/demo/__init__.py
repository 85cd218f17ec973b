"""`python -m examples.demo`: train a small language model on real text, with the public interface
of the package.
"""

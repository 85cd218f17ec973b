"""Bytes and time: tensors, streams and collectives; knows no module tree and makes no policy."""

"""The dialects of harnesses: bytes and deltas in, deltas and bytes out. Pure: no clock, socket, task or logger."""

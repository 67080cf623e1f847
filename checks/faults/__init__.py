"""Faults in real runs: what strikes whom, in which phase, and what must be true afterwards. `make test-faults`."""

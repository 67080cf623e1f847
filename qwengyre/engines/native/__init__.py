"""Compiled kernels of the embedded engine: C source, built with the machine's own compiler at first use."""

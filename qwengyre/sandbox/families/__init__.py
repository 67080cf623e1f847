"""Deterministic families of tasks, written as folders in the Harbor format."""

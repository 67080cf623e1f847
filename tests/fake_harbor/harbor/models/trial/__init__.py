"""A part of the Harbor of tests."""

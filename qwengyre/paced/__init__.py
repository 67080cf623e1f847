"""Emulated devices: an engine and a trainer that take as long as a plan says, for runs of many cells on one machine."""

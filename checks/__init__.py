"""Slow checks, each behind a target of the Makefile; not part of `make test`."""

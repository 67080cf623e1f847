"""Rules of the user's own, in Python, by dotted path in the run file: docs/hooks.md."""

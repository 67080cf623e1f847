"""Curves, tables and costs of a run on their way to trackers: docs/tracking.md."""

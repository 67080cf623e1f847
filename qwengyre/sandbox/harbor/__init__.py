"""Trials of Harbor: its agents in its environments, with a run's gateway as their model."""

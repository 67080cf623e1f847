"""Cells as processes, and the controller that drives them: the shell around the pure scheduler."""

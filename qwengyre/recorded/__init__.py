"""What a run recorded, read while it goes on or afterwards: its executions, their calls and their scores."""

"""What a run leaves behind for people and programs: the run folder, metrics, the summary, the memory meter."""

"""What a machine or a cluster offers for a run, what is missing, and what to do about it. `qwengyre doctor` prints it."""

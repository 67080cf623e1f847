"""What people see of a run: the live screen, the table at its end, the report. All fed by plain records."""

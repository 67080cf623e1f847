"""Ids, records, the state machine and the error tree. Pure: every other folder imports it, it imports none."""

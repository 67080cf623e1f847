"""Imported ahead by the trial host; what it does is in `trial.py` here."""

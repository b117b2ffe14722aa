"""Detects lost, hung and stopped processes of a run, and ends the run in order."""

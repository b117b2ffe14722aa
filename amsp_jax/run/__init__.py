"""A training run: settings, data, the loop, checkpoints, metrics and the run folder."""

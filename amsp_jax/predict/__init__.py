"""Cost model, calibration and planner: step time and memory of a strategy on a cluster, without running it."""

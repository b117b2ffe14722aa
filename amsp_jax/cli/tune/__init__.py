"""The search for the fastest settings on the machine itself: each trial is a short run of the trainer."""

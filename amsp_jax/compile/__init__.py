"""XLA: compiler flags, compiled programs read as text, and compilation for target devices that are absent."""

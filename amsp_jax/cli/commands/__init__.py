"""The commands of `python -m amsp_jax`, one file each."""

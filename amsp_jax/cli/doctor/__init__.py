"""What an installation and a cluster lack for training, and the next step for each thing.

`findings`, `packages`, `files`, `machine` and `table` import neither jax nor any other dependency, so that the doctor
runs where one of them is missing; `cluster` and what it imports need jax.
"""

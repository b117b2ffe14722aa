"""The sharded training step: meshes, plans, collectives, rematerialisation, pipeline and context parallelism, state."""

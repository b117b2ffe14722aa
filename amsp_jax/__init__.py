"""AMSP, ZeRO and the Frontier recipe as one JAX framework."""

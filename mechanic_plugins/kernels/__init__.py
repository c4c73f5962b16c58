"""The passes over memory: torch operations, and Triton on a GPU."""

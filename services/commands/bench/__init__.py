"""`lockstep bench`: benchmarks of the stack, of its parts, and of other servers beside it."""

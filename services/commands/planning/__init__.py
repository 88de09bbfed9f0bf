"""`lockstep plan`: what fits where, from configs and headers alone."""

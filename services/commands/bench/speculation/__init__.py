"""`lockstep bench speculation`: throughput gained by drafts, and proof that texts stay the same."""

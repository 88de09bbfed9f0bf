"""`lockstep cache`: asks the cache store, or reads its directory where none runs."""

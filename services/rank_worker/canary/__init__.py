"""The canary: known computations before a world serves."""

"""The models that benchmarks run."""

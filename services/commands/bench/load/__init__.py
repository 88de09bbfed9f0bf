"""Load that benchmarks put on a server: prompts, HTTP clients and their measurements."""

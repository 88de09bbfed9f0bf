"""Tools that all benchmarks share: child processes, machine facts, statistics, reports."""

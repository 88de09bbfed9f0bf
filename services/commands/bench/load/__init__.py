"""The load that benchmarks put on a server: clients, requests, and what they measure."""

"""Benchmarks: engines side by side on made-up workloads, and what is reported of them."""

"""Benchmarks: several engines side by side on synthetic workloads, and the reports."""

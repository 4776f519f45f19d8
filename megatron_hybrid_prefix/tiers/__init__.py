"""The second tier: KV blocks and states in pinned host memory. What is there is decided in ``index/host_tier.py``."""

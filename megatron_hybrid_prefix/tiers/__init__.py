"""The second tier: KV blocks and states in pinned host memory. ``index/host_tier.py`` decides what they hold."""

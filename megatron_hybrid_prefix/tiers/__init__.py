"""The second tier: KV blocks and states in pinned host memory. ``tiers/host.py`` decides what they hold."""

"""Recurrent states on the device: memory, where a forward reads and writes them, moves between tiers."""

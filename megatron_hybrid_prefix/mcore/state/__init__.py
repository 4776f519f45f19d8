"""Recurrent states on the device: their layout, their memory, and moves between tiers."""

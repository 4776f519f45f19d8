"""Policies: which boundaries of a prompt get a checkpoint, and which checkpoint is evicted."""

"""The `Mover`: copies of KV blocks and states between the device, pinned host memory, and the tier behind it. It decides nothing."""

"""The memory that KV blocks and states share: its pages (`pages`), slots and their owners (`slots`, both without torch), what a state is
(`layout`), and the tensors (`shared_memory`).
"""

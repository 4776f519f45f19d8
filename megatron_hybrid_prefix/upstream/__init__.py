"""What this package takes for granted of megatron-core's internals: `contract` lists it, `check` compares it."""

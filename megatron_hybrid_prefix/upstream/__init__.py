"""What this package relies on in megatron-core: `contract` lists it, `check` compares it with the installed version."""

"""Short scripts, one topic each. (A package, as Megatron-LM's folder of this name is one, and would hide this one.)"""

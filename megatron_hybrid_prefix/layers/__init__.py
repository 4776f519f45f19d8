"""Kinds of recurrent layers: the interface (`base`), the list of kinds (`kinds`), the description of a step (`step`)."""

"""Kinds of recurrent layers: what one is (`base`), which there are (`kinds`), what a step tells them (`step`); a file a kind."""

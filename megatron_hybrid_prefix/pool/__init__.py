"""Where recurrent states live. ``slots`` only counts; it needs no torch."""

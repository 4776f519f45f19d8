"""What every command shares: the terminal, and options of models and engines."""

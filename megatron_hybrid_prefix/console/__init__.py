"""Shared by all commands: terminal output, and the options of models and engines."""

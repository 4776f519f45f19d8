"""The commands, one module a verb; each has ``main(argv)``, which returns the exit code."""

"""The commands, one module per verb. Each has ``main(argv)``, which returns the exit code."""

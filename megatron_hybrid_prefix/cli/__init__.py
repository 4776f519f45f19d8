"""The command line: a module a verb, with `main(argv) -> exit code`. Nothing of the package imports it."""

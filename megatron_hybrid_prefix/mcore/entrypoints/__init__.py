"""How an engine is made: build_engine, install, the command line's flags, the patches."""

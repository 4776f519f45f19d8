"""Ways to make an engine: build_engine, install, command-line flags."""

"""The OpenAI-compatible HTTP server, for one engine or several replicas. Needs the extra ``serve``."""

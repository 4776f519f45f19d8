"""The server: the OpenAI API over HTTP, around one engine or several replicas of it. Needs the extra ``serve``."""

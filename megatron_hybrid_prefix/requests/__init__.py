"""Requests: what a prompt can reuse, what a running request holds and loads, and log-probs of prompts. Only decisions."""

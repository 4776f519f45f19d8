"""Text and token ids."""

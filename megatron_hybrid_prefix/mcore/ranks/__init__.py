"""What ranks agree on, and how they meet."""

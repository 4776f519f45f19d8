"""Agreement between ranks, and their meeting before they serve."""

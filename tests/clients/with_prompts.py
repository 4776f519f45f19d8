"""What the programs of the other environment ask. It imports nothing, so that they can import it."""

PROMPT = "The cache keeps keys and values of a prompt in blocks. " * 8
MESSAGES = [{"role": "system", "content": PROMPT}, {"role": "user", "content": "Which block is evicted first?"}]

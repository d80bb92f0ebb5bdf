"""What replies and learns: the contract, and language models behind it."""

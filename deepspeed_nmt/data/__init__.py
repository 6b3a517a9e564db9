"""Text to tokens to updates: cleaning, vocabulary, memory-mapped corpus, batch plan, loader."""

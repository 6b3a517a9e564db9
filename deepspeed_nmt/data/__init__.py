"""Data: cleaning, tokenizers, memory-mapped corpus, batching, loader, data directories."""

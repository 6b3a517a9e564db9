"""A run on disk, and all that is put together to train it."""

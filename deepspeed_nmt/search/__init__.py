"""Decoding: searches for the best translation. Their registry is :mod:`deepspeed_nmt.search.searches`."""

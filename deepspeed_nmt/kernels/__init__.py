"""Fused operations with several backends: torch references, Triton, apex, and the choice between them."""

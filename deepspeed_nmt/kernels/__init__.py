"""Fused operations: public functions with plain torch references."""

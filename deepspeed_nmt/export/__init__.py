"""Weights for other programs, each with a certificate."""

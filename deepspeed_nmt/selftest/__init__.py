"""Comparison of engines and layouts on this machine or cluster."""

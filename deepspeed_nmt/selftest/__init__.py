"""Comparison of engines and layouts on this machine, with small models of every method."""

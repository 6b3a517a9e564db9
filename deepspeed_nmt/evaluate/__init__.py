"""Scores of translations, curves of runs, and pictures of both."""

"""Fixtures of the toys: the small corpus of tests/system."""

from tests.system.conftest import data

__all__ = ["data"]

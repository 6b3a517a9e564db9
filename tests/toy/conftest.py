"""Fixtures of the toys: the small corpus of the system tests."""

from tests.system.conftest import data

__all__ = ["data"]

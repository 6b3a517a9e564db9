"""Toys are trained on the same small corpus as the runs of tests/system."""

from tests.system.conftest import data

__all__ = ["data"]

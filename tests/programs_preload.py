"""Imported by the fork server when it starts."""

from tests.programs import preload

preload()

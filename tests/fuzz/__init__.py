"""Tests by random input: the only ways out of a command are 0, a documented status, and a sentence."""

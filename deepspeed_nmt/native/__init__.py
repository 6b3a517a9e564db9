"""Native code for decoding on a CPU."""

"""Memory and work of a run, counted before it starts, and advice on settings."""

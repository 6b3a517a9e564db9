"""One file per command; with `cli`, the only place that knows every room."""

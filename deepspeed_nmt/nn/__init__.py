"""Building blocks of the models in pure torch: no configuration, no communication, no engine."""

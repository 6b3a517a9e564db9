"""Building blocks of models, in pure torch: they know no configuration, communication or engine."""

"""Interfaces of models, batches, objectives and the settings of a run's parts."""

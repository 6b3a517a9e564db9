"""What a translation model, a batch and an objective are."""

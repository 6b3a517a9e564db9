"""What the models made of two BERTs share: configuration, layers, and loading of pretrained weights."""

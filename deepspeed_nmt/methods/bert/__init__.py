"""Settings, layers and pretrained weights of models that consist of two BERTs."""

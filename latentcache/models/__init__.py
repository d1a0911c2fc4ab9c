"""Models -> tensors: loading and identifying the frozen encoders of a model, and running them."""

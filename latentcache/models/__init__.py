"""Models -> tensors: loading and identifying SDXL's frozen encoders, and running them."""

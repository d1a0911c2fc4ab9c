"""Loading, identifying and running the frozen parts of a model."""

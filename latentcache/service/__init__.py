"""The HTTP service: one cache for several trainers and machines."""

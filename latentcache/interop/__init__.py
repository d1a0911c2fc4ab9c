"""Caches of other trainers: what is read from them, how it is trusted, what is written for them. Knows no format."""

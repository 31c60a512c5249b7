"""Surfaces, a file a room of the product."""

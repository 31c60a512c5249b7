"""A user's own runs and steps: how to read them, their predictions, and profiles fitted to them.

The estimates of fastroof.serving never import it.
"""

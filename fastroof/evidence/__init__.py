"""Evidence from a user's own runs and steps: reading them, predicting them, fitting profiles to them.

The estimates of fastroof.serving never import this package.
"""

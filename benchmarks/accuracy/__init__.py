"""Accuracy of the shipped profiles: validation, fits and studies. Needs a checkout."""

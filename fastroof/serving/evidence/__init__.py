"""What estimates of serving are judged by: measured runs and steps, fits to them, and errors of predictions.

The estimates beside this package never import it.
"""

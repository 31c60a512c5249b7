"""Job files for clusters, and handing them over."""

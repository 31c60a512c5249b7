"""What to measure: grids as data, their points, what they cost."""

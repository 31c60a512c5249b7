"""What to measure: grids as TOML, their points, what those cost, and how much of them tables hold."""

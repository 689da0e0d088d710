"""How the time of a step grows with one quantity at a time."""

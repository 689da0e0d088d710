"""Can a row with a gradient be told from one without by how floating-point numbers came about? Runs, attacks, a table."""

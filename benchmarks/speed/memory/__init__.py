"""A table of half of the machine's memory, from the model to its files."""

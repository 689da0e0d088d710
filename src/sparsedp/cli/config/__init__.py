"""What runs and sweeps are configured by: the schema, the kinds of data set and model, and how files are read."""

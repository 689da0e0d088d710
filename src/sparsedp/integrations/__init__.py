"""Other tools, each with an extra of its own."""

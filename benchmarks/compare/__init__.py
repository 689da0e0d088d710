"""The package of this tree against that of another revision, in steps that take turns."""

"""The stages of steps against the least that they could take."""

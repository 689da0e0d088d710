"""One table of more and more rows under every mechanism."""

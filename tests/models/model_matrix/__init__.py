"""Models of other packages, one line each, and what private training makes of them."""

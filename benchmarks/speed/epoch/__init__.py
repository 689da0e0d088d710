"""A whole epoch against plain PyTorch's."""

"""A private step against a plain PyTorch one."""

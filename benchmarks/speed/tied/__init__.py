"""A Transformer whose input and output table are one."""

"""Compiled loops, the threads they run on, the stream cipher and what is drawn from it, and mapped files."""

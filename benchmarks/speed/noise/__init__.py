"""Normal numbers from ChaCha8 against torch's own."""

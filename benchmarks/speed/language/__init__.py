"""Language models of real sizes: with LoRA, in full, and with large vocabularies."""

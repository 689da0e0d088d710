"""Examples. A package, so that configurations can name what is in here: Opacus installs an `examples` of its own."""

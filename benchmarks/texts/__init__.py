"""Language models: section 4.4 of the DP-AdaFEST paper."""

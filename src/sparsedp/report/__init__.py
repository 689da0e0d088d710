"""What is made of finished runs: tables, fronts and plots."""

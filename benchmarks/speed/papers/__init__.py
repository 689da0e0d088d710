"""What the papers published about speed, beside what the parts measured."""

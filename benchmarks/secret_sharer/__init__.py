"""The experiment of section 4.1.3 of the EANA paper: precision@k against exposure, for every mechanism."""

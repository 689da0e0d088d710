"""The dual encoder of the EANA paper."""

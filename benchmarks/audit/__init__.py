"""Audits of the mechanisms themselves: what docs/audit.md reports."""

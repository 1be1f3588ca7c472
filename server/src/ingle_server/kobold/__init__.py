"""Kobold's API on top of completions."""

"""Finds plugins, keeps their failures apart, and chooses among what they offer."""

"""Calls of the client's functions: found in the model's text, or forced by a grammar."""

"""Anthropic's Messages API on top of a chat."""

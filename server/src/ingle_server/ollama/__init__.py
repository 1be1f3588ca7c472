"""Ollama's API on top of chats and completions."""

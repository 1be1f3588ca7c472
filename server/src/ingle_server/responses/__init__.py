"""OpenAI's Responses API: items in, items out, kept in memory for the next turn."""

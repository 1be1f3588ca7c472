"""Speed of one model: measured in this process, and in alternation with other engines."""

"""From prompts to a buffer full of whole episodes, ready for an update."""

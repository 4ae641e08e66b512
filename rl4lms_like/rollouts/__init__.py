"""Collection of rollouts: from prompts to a buffer of whole episodes for an update."""

"""Models that need no hub: created, or trained on generated texts, in seconds."""

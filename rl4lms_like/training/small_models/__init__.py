"""Models that need no hub: made, or trained from our own texts, in seconds."""

"""Data and mathematics: samples, episodes, masks, token scores, losses, advantages."""

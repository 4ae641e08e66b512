"""Training on given texts: supervised and preference runs."""

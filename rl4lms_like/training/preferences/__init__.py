"""Training on preferences: objectives, encoding of pairs, log-probs of the reference, alerts."""

"""Training on responses that the policy generates: the iteration, and what belongs to one such run."""

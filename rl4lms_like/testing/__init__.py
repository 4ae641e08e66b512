"""For users: checkers for their own components, and tiny models to try them on."""

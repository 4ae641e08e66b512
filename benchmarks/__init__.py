"""Side-by-side measurements: each one command, results as JSON."""

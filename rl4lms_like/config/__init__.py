"""Configuration of a run: read from YAML, resolved and checked in full before anything is loaded."""

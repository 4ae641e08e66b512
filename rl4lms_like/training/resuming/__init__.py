"""Runs that go on: what is saved, where, and from what a run goes on."""

"""The run doctor: what goes wrong in a run is seen while it trains, and explained once."""

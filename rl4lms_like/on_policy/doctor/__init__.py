"""The run doctor: detects problems of a run while it trains, and reports each of them once."""

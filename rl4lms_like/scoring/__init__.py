"""Scores of texts: one function per score, used by the reward and the metric of the same name."""

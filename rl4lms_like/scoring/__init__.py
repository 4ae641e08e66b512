"""Text in, numbers out: one function a score, used by the reward and the metric of that name."""

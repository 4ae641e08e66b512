"""Many runs side by side, and what they say together: seeds, tables, intervals, learning curves."""

"""Who reduces how much, and how the vector is cut: pure functions from a group to a plan."""

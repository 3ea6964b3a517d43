"""Virtual time, a simulated network and contract suites, for this package's tests and for yours."""

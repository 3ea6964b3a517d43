"""Virtual time, a simulated network, plans of faults and contract suites, for this package's tests and for yours."""

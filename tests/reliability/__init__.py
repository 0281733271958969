"""The long reliability tests: the whole fault matrix, launch and stop in cycles, many hosts, a soak."""

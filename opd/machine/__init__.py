"""The process and its machine: addresses, compilers, devices, imports, signals, and the leftovers of killed processes."""

"""The process and the machine that it runs on: addresses, compilers, devices, signals, what killed processes leave."""

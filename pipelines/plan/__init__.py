"""`opd plan`: what a merge needs and how long it takes, from shapes and rates alone, before any machine is rented."""

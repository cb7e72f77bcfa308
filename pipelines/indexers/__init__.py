"""`opd indexers`: search a pattern of shared indexers, and train the indexers for it."""

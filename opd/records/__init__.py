"""The records that parts hand each other and that files keep: plain frozen values, no torch."""

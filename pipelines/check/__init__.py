"""`opd check`: whether the experts of a merge can teach it anything."""

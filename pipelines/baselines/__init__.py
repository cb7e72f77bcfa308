"""Other ways of merging the same experts, measured on the same exams: `opd baseline` and `opd compare`."""

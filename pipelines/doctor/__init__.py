"""`opd doctor`: is this machine, with these packages, one that a merge can run on, and what is to be done where it is not?"""

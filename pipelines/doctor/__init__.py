"""`opd doctor`: check whether merges can run on this machine with these packages, and say what to do if not."""

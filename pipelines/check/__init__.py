"""`opd check`: can the experts of a merge teach the student anything?"""

"""The view that a person has of a merge, while it goes on and afterwards: one view, drawn by one renderer.

    opd merge    records as they come ──┐
                                        ├─▶ course ─▶ view ─▶ render ─▶ a screen
    opd status   the run directory ─────┘

interfaces  what a merge needs of whoever shows it
live_state  what a merge does at this moment (`LiveState`), and the file that tells other processes
progress    the reporter of a merge: it feeds the metrics file, sinks and display
course      the records of the steps so far, in few numbers
view        all that a screen shows, as a frozen record
render      a view as something that rich draws, fitted into a given size
displays    a screen on a terminal, lines elsewhere, JSON, or nothing
memory      how much memory a process and its workers take
waiting     the line on the screen until a merge begins
status      the state of a run directory, and all run directories below a directory
"""

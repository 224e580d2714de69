"""Everything about processes: who starts, watches and ends which process, and the messages on each socket.

The parent modules (launcher, supervisors, standby, child) import no torch. No module knows a model, kernel or route.
"""

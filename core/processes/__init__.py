"""Everything about processes: who starts, watches and ends which process, and the messages on each socket.

The parent modules (launcher, supervisors, standby, child) import no torch. Knows no model, no kernel and no route.
"""

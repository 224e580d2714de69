"""Everything about processes: who starts, watches and ends whom, and what they tell each other over which socket.

The parent modules (launcher, supervisors, standby, child) import no torch. Knows no model, no kernel and no route.
"""

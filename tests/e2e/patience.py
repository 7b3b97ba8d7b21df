"""How long tests wait for a program before they call it hung.

Long, as others keep the machine busy: what takes two seconds has taken three minutes. Nothing that works waits for it.
"""

SECONDS = 600

"""How long tests wait for a program before they call it hung.

Long, as others keep the machine busy: what takes two seconds has taken three minutes. Nothing that works waits for it.
Long forms of tests may need more, and pytest's --timeout then.
"""

import os

SECONDS = int(os.environ.get("GSD_TEST_SECONDS", 600))

"""How many seconds tests wait for a program before they treat it as hung.

The limit is generous because the machine may be busy: operations of two seconds have taken three minutes. A test that
passes never waits that long. The long forms of some tests may need more; raise pytest's --timeout with it.
"""

import os

SECONDS = int(os.environ.get("GSD_TEST_SECONDS", 600))

"""For processes that have this folder on their path: ranks, which vLLM starts afresh, are interpreted too."""

import interpreter

interpreter.enable()

"""Facts about the installed vLLM: every wrapped upstream symbol, with the reason and when the wrap goes.

Each one has a contract test in tests/contract.
"""

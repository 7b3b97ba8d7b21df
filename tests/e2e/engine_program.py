"""The program that an ``Engine``'s process runs. Its standard input is the connection to the ``Engine``."""

import engine_process

if __name__ == "__main__":
    engine_process.main()

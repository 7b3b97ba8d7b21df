"""Runs a program that uses Ray Data and never finishes: ``unfinished_run.py PID_FILE ROWS PROGRAM ...``.

It writes its process id into the file. The program waits forever once it has taken that many rows of a dataset, so a
test can kill it on its way even if the machine is so busy that the test itself hardly runs.
"""

import os
import runpy
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from ray.data import Dataset


def main() -> None:
    pid_file, most, *arguments = sys.argv[1:]
    Path(pid_file).write_text(str(os.getpid()))
    iter_rows = Dataset.iter_rows

    def some_rows(dataset: Dataset) -> Iterator[dict]:
        for number, row in enumerate(iter_rows(dataset)):
            if number == int(most):
                threading.Event().wait()
            yield row

    Dataset.iter_rows = some_rows
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()

"""Checks many ``vllm serve`` command lines in one process, without loading weights.

Reads a JSON list of argument lists from stdin and writes a JSON list of ``[exit code, message]`` to stdout. The code is
0 for a valid command line. It is None for an exception that is not meant for users; the message is then its traceback.
"""

import contextlib
import io
import json
import sys
import traceback


def main() -> None:
    cases = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        from vllm.entrypoints.cli.serve import cmd_init
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = FlexibleArgumentParser()
        cmd_init()[0].subparser_init(parser.add_subparsers())
        answers = [_refusal(parser, arguments) for arguments in cases]
    json.dump(answers, sys.stdout)


def _refusal(parser, arguments: list[str]) -> tuple[int | None, str]:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from vllm_gsd.config import GSDConfigError

    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            args = parser.parse_args(["serve", *arguments])
        args.model = args.model_tag
        AsyncEngineArgs.from_cli_args(args).create_engine_config()
    except SystemExit as error:
        return error.code, stderr.getvalue()
    except GSDConfigError as error:
        return 1, f"vllm: error: {error}"
    except Exception:
        return None, traceback.format_exc()
    return 0, ""


if __name__ == "__main__":
    main()

"""`python -m llamagpu` and the `llamagpu` command."""

import os
import signal


def main() -> None:
    """Run the command line. Ctrl-C during its imports, which take 0.1 s, ends without a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not ignored, as in a background job
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from llamagpu.cli.main import main as run

    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()

"""`python -m llamagpu` is the `llamagpu` command."""

from llamagpu.cli.main import main

if __name__ == "__main__":
    main()

"""`python -m llamagpu` is the `llamagpu` command."""

from llamagpu.cli import main

if __name__ == "__main__":
    main()

"""`python -m smkern` is the command `smkern`."""

from smkern.cli import main

if __name__ == "__main__":
    main()

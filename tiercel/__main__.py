"""`python -m tiercel` is the command `tiercel`."""

from tiercel.cli.main import main

if __name__ == "__main__":
    main()

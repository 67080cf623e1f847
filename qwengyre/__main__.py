"""`python -m qwengyre` is the command `qwengyre`, of this very Python."""

from qwengyre.cli.main import main

if __name__ == "__main__":
    main()

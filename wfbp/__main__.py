"""``python -m wfbp``: the same as the command ``wfbp``."""

from wfbp.cli.app import main

if __name__ == "__main__":
    main()

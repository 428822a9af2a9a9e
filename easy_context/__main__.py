"""`python -m easy_context`: the command `easy-context`."""

from .planner.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m rollout` is the command `rollout`, for an interpreter whose scripts are not on PATH."""

from rollout.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m cpupp`."""

from cpupp.cli import main

if __name__ == "__main__":
    main()

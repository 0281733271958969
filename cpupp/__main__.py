"""`cpupp` and `python -m cpupp`."""


def main() -> None:
    """Run the command line."""
    try:
        from cpupp.cli import main as run

        run()
    except KeyboardInterrupt:  # Ctrl-C while the imports still run: before any verb has its own handler
        import os

        os._exit(130)


if __name__ == "__main__":
    main()

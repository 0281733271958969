"""cpupp: one large model over several CPU machines. Holds the version and imports nothing."""

__version__ = "0.1.0"

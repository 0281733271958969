"""Pure planning: data in, data out. Nothing here reads a file, a clock, a socket or the environment."""

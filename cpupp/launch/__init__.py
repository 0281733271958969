"""All effects of the launcher: files, SSH, processes, time."""

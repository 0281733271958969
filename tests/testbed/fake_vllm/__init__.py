"""A scripted vLLM: the processes, log lines, announcements and API that cpupp sees, and no model.

Runs in the place of vLLM inside the environment that `tests.testbed.fake_engine` makes, on the standard library alone.
"""

"""`make compat`: the two-host pipeline with several versions of vLLM, each in an environment of its own."""

"""Real vLLM, a real model, real SSH: what a user does, on hosts made of network namespaces."""

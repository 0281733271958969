"""What runs on the hosts: the agent beside vLLM, and the communicator inside it."""

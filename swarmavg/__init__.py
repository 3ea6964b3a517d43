"""swarmavg: decentralised averaging of PyTorch training state between machines that come and go."""

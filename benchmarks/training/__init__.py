"""Training steps of vitkern, eager PyTorch and torch.compile on this CPU: time, memory, loss."""

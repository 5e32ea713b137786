"""vitkern on a GPU: checked against float64 first, then timed by the device's own events beside
eager PyTorch, timm and torch.compile. `vitkern bench --device cuda`, or pytest with --device cuda.
"""

"""What torch.compile would keep of a layer."""

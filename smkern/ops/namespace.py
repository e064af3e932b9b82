"""Where in torch.library every family registers its operators."""

NAMESPACE = "smkern"
"""`torch.ops.smkern`."""

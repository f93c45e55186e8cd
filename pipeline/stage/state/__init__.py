"""What layers keep from step to step beside parameters."""

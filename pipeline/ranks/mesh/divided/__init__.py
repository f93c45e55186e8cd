"""Parameters that replicas divide among themselves, and layers that ranks share."""

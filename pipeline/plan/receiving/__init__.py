"""Where messages wait, and behind which action their receives are posted."""

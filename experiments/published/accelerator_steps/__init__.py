"""What the operations of a full model take on an accelerator, and what fits into its memory."""
